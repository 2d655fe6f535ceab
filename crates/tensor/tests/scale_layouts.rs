//! Scale addresses, against the same orders written as nested loops over memory.

use antiphon_tensor::{
    PackedScales, ScaleGrid, ScaleLayout, TensorError, compute_fp4_swizzled_layout_sf_size,
};
use proptest::prelude::*;

/// The row and column that each byte of a layout holds, in the order of memory, padding included.
fn memory_order(layout: ScaleLayout, rows: usize, columns: usize) -> Vec<(usize, usize)> {
    let mut order = Vec::new();
    match layout {
        ScaleLayout::Swizzled128x4 => {
            for row_tile in 0..rows.div_ceil(128) {
                for column_tile in 0..columns.div_ceil(4) {
                    for lane in 0..32 {
                        for quarter in 0..4 {
                            for column in 0..4 {
                                order.push((row_tile * 128 + quarter * 32 + lane, column_tile * 4 + column));
                            }
                        }
                    }
                }
            }
        }
        ScaleLayout::Swizzled8x4 => {
            for row_tile in 0..rows.div_ceil(8) {
                for column_tile in 0..columns.div_ceil(4) {
                    for row in 0..8 {
                        for column in 0..4 {
                            order.push((row_tile * 8 + row, column_tile * 4 + column));
                        }
                    }
                }
            }
        }
        ScaleLayout::Linear => {
            for row in 0..rows {
                for column in 0..columns {
                    order.push((row, column));
                }
            }
        }
    }
    order
}

/// The token and group that each byte of packed scales holds, in the order of memory, padding included.
fn packed_memory_order(tokens: usize, groups: usize) -> Vec<(usize, usize)> {
    let mut order = Vec::new();
    let words = groups.div_ceil(4);
    for word in 0..words {
        let last = word + 1 == words;
        for token in 0..if last { tokens } else { tokens.next_multiple_of(4) } {
            for byte in 0..4 {
                order.push((token, word * 4 + byte));
            }
        }
    }
    if tokens == 0 { Vec::new() } else { order }
}

fn check_grid(layout: ScaleLayout, rows: usize, columns: usize) {
    let grid = ScaleGrid::new(layout, rows, columns).unwrap();
    let order = memory_order(layout, rows, columns);
    assert_eq!(grid.size(), order.len(), "{layout} of {rows} by {columns}");
    for (offset, &(row, column)) in order.iter().enumerate() {
        let inside = row < rows && column < columns;
        assert_eq!(grid.position(offset), inside.then_some((row, column)), "{layout} byte {offset}");
        assert_eq!(grid.offset(row, column).ok(), inside.then_some(offset), "{layout} of {row}, {column}");
    }
    assert_eq!(grid.position(grid.size()), None);

    let listed: Vec<_> = grid.iter().collect();
    assert_eq!(listed.len(), rows * columns);
    assert!(listed.iter().enumerate().all(|(at, &(row, column, offset))| {
        at == row * columns + column && grid.offset(row, column) == Ok(offset)
    }));

    let linear: Vec<u8> = (0..rows * columns).map(|at| (at % 255 + 1) as u8).collect();
    let (mut scales, mut back) = (vec![0xEE; grid.size()], vec![0; rows * columns]);
    grid.swizzle(&linear, &mut scales).unwrap();
    grid.unswizzle(&scales, &mut back).unwrap();
    assert_eq!(back, linear);
    assert!((0..grid.size()).all(|at| (scales[at] == 0) == grid.position(at).is_none()), "padding is zero");
}

fn check_packed(tokens: usize, groups: usize) {
    let packed = PackedScales::new(tokens, groups).unwrap();
    let order = packed_memory_order(tokens, groups);
    assert_eq!(packed.size(), order.len(), "{tokens} tokens of {groups} groups");
    for (offset, &(token, group)) in order.iter().enumerate() {
        let inside = token < tokens && group < groups;
        assert_eq!(packed.position(offset), inside.then_some((token, group)), "byte {offset}");
        assert_eq!(packed.offset(token, group).ok(), inside.then_some(offset));
    }
    assert_eq!(packed.position(packed.size()), None);
    assert_eq!(packed.iter().count(), tokens * groups);
    assert!(packed.iter().all(|(token, group, offset)| packed.offset(token, group) == Ok(offset)));
    // The storage that a tensor of words with these strides reaches.
    let ([m, words], [token_step, word_step]) = (packed.shape(), packed.strides());
    if tokens * groups > 0 {
        assert_eq!(packed.size(), 4 * ((m - 1) * token_step + (words - 1) * word_step + 1));
    }
}

#[test]
fn small_grids() {
    for layout in ScaleLayout::ALL {
        for (rows, columns) in
            [(0, 0), (0, 5), (5, 0), (1, 1), (7, 3), (8, 4), (9, 5), (128, 4), (129, 9), (300, 6)]
        {
            check_grid(*layout, rows, columns);
        }
    }
}

#[test]
fn small_packs() {
    for tokens in [0, 1, 3, 4, 5, 8, 13] {
        (0..14).for_each(|groups| check_packed(tokens, groups));
    }
}

#[test]
fn sizes_are_those_of_flashinfer() {
    for (rows, columns, size) in
        [(1, 1, 512), (128, 4, 512), (129, 4, 1024), (128, 5, 1024), (200, 448, 114_688)]
    {
        assert_eq!(compute_fp4_swizzled_layout_sf_size(rows, columns), Ok(size));
    }
    assert_eq!(ScaleGrid::new(ScaleLayout::Swizzled8x4, 9, 5).unwrap().size(), 16 * 8);
    assert_eq!(ScaleGrid::new(ScaleLayout::Linear, 9, 5).unwrap().size(), 45);
    // An int32 tensor of shape (5, 2), strides (1, 8).
    assert_eq!(PackedScales::new(5, 8).unwrap().size() / 4, 5 + 8);
}

#[test]
fn codes_are_those_of_flashinfer() {
    let codes: Vec<_> = ScaleLayout::ALL.iter().map(|layout| (layout.code(), layout.to_string())).collect();
    let expected = [(0, "SWIZZLED_128x4"), (1, "SWIZZLED_8x4"), (2, "LINEAR")];
    assert_eq!(codes, expected.map(|(code, name)| (code, name.to_owned())));
    for code in -1..=3 {
        let layout = ScaleLayout::ALL.iter().copied().find(|layout| i64::from(layout.code()) == code);
        assert_eq!(ScaleLayout::from_code(code), layout.ok_or(TensorError::UnknownScaleLayout { code }));
    }
    assert_eq!(
        ScaleLayout::from_code(7).unwrap_err().to_string(),
        "unknown scale layout 7: known are 0 (SWIZZLED_128x4), 1 (SWIZZLED_8x4) and 2 (LINEAR)"
    );
}

#[test]
fn what_cannot_be_is_refused() {
    for layout in ScaleLayout::ALL {
        for (rows, columns) in [(usize::MAX, 1), (1, usize::MAX), (1 << 40, 1 << 40), (usize::MAX - 2, 0)] {
            let result = ScaleGrid::new(*layout, rows, columns);
            let addressable = *layout == ScaleLayout::Linear && columns == 0;
            assert_eq!(result.is_ok(), addressable, "{layout} {rows} {columns}");
        }
    }
    let overflow = TensorError::ShapeOverflow { shape: vec![usize::MAX, 1], element_size: 1 };
    assert_eq!(ScaleGrid::new(ScaleLayout::Swizzled8x4, usize::MAX, 1), Err(overflow.clone()));
    assert_eq!(PackedScales::new(usize::MAX, 1), Err(overflow));
    assert!(PackedScales::new(1 << 40, 1 << 40).is_err());

    let grid = ScaleGrid::new(ScaleLayout::Swizzled8x4, 3, 2).unwrap();
    assert_eq!(grid.offset(3, 0).unwrap_err().to_string(), "index [3, 0] leaves a tensor of shape [3, 2]");
    assert_eq!(
        grid.swizzle(&[0; 6], &mut [0; 6]).unwrap_err().to_string(),
        "the buffer of scales has 6 entries instead of 32"
    );
    assert_eq!(
        grid.unswizzle(&[0; 32], &mut [0; 7]).unwrap_err().to_string(),
        "the buffer of row-major scales has 7 entries instead of 6"
    );
    assert!(PackedScales::new(3, 2).unwrap().offset(0, 2).is_err());
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: if cfg!(miri) { 2 } else { 64 },
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn any_grid_is_the_order_of_memory(
        layout in proptest::sample::select(ScaleLayout::ALL),
        rows in 0_usize..400,
        columns in 0_usize..40,
    ) {
        check_grid(layout, rows, columns);
    }

    #[test]
    fn any_pack_is_the_order_of_memory(tokens in 0_usize..70, groups in 0_usize..70) {
        check_packed(tokens, groups);
    }
}
