//! Every identity of the table, on random elements.

use antiphon_tensor::DType;

use super::{
    Terms,
    identities::{Elements, Enabled, Identity, Row, TABLE},
};
use crate::{
    graph::Graph,
    interpret::{Arithmetic, Tensor, interpret},
    numerics::{Numerics, rounded},
    op::Prim,
    types::Element,
    verify::verify,
};

const DTYPES: [DType; 8] =
    [DType::F64, DType::F32, DType::F16, DType::BF16, DType::I64, DType::I32, DType::I8, DType::U8];

/// A type that has all values of another and more.
fn wider(dtype: DType) -> Option<DType> {
    match dtype {
        DType::F16 | DType::BF16 => Some(DType::F32),
        DType::F32 => Some(DType::F64),
        DType::I8 | DType::U8 => Some(DType::I32),
        DType::I32 => Some(DType::I64),
        _ => None,
    }
}

/// A side of a row as a program; none for elements for which it says nothing.
fn program(row: &Row, side: usize, dtype: DType) -> Option<Graph> {
    let wide = wider(dtype);
    match row.identity {
        Identity::CastThatKeeps if wide.is_none() => return None,
        Identity::RoundingLess if dtype == DType::BF16 => return None,
        // It has the number of the row, and calls of it are not fused.
        Identity::CastOfNumber | Identity::PowerOfLogarithm if dtype == DType::F64 => return None,
        _ => {}
    }
    let body = row.sides[side].replace(": T[", &format!(": {dtype}["));
    let body = body.replace(": W[", &format!(": {}[", wide.unwrap_or(dtype)));
    let inputs: String = ["x", "y", "z"].map(|name| format!("%{name}: {dtype}[4,8] = input()\n")).concat();
    let text = format!("group tp size 2\ngroup one size 1\n{inputs}{body}\nreturn %r");
    let graph = Graph::from_text(&text).unwrap();
    assert_eq!(verify(&graph), [], "{text}");
    Some(graph)
}

fn are_one(enabled: Enabled, numerics: Numerics, sides: &[Graph; 2]) -> bool {
    let mut terms = Terms::with(numerics, &[], enabled);
    let [x, y] = [0, 1].map(|side| {
        let graph = &sides[side];
        terms.of(graph, &graph.analyse()).value(graph.outputs[0]).unwrap()
    });
    x == y
}

/// Elements of two ranks: fractions whose reciprocals and roots are ordinary, integers of all sizes.
fn inputs(dtype: DType, random: &mut impl FnMut() -> f64) -> Vec<Vec<Tensor>> {
    let (least, values) = match dtype {
        DType::U8 => (0.0, 2f64.powi(8)),
        DType::I8 => (-128.0, 2f64.powi(8)),
        DType::I32 => (-2f64.powi(31), 2f64.powi(32)),
        // The interpreter has integers up to 2⁵³, which products of three of these do not reach.
        DType::I64 => (-2f64.powi(16), 2f64.powi(17)),
        _ => (0.25, 4.0),
    };
    let mut element = || rounded(dtype, least + values * random());
    let mut tensor =
        || Tensor { dtype: dtype.into(), shape: vec![4, 8], data: (0..32).map(|_| element()).collect() };
    (0..2).map(|_| (0..3).map(|_| tensor()).collect()).collect()
}

#[test]
fn every_row_holds_and_is_what_makes_its_sides_one() {
    let mut state = 5u64;
    let mut random = || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 11) as f64 / 2f64.powi(53)
    };
    for row in TABLE {
        let (mut tried, mut is_needed) = (0, false);
        for dtype in DTYPES {
            let Some(sides) = program_pair(row, dtype) else { continue };
            for (numerics, elements) in [(Numerics::Same, row.to_the_bit), (Numerics::Close, row.of_reals)] {
                let all = are_one(Enabled::all(numerics), numerics, &sides);
                assert_eq!(all, elements.holds(dtype), "{:?} {numerics:?} {dtype}", row.identity);
                let without = are_one(Enabled::without(numerics, row.identity), numerics, &sides);
                is_needed |= !without;
                if !all {
                    continue;
                }
                tried += 1;
                for _ in 0..20 {
                    let given = inputs(dtype, &mut random);
                    let run = |side: usize, arithmetic| interpret(&sides[side], &given, arithmetic).unwrap();
                    let [left, right] = [0, 1].map(|side| run(side, Arithmetic::Kernels));
                    if row.to_the_bit.holds(dtype) {
                        let bits = |ranks: &Vec<Vec<Tensor>>| -> Vec<u64> {
                            ranks.iter().flatten().flat_map(|t| &t.data).map(|x| x.to_bits()).collect()
                        };
                        assert_eq!(bits(&left), bits(&right), "{:?} {dtype}", row.identity);
                        continue;
                    }
                    let exact = run(0, Arithmetic::Exact);
                    let bound = f64::from(row.roundings) * rounding(row, dtype);
                    for found in [left, right] {
                        for (x, y) in found.iter().flatten().zip(exact.iter().flatten()) {
                            let largest = y.data.iter().fold(10.0, |most: f64, x| most.max(x.abs()));
                            let apart = x.data.iter().zip(&y.data).map(|(x, y)| (x - y).abs());
                            let apart = apart.fold(0.0, f64::max) / largest;
                            assert!(apart <= bound, "{:?} {dtype}: {apart} above {bound}", row.identity);
                        }
                    }
                }
            }
        }
        assert!(is_needed, "{:?} follows from the others", row.identity);
        assert!(tried > 1, "{:?} was tried {tried} times", row.identity);
    }
}

impl Elements {
    fn holds(self, dtype: DType) -> bool {
        match self {
            Self::None => false,
            Self::Integers => !dtype.is_float(),
            Self::Floats => dtype.is_float(),
            Self::All => true,
        }
    }
}

fn program_pair(row: &Row, dtype: DType) -> Option<[Graph; 2]> {
    if !row.of_reals.holds(dtype) {
        return None;
    }
    Some([program(row, 0, dtype)?, program(row, 1, dtype)?])
}

/// The rounding of the narrowest elements on the way.
fn rounding(row: &Row, dtype: DType) -> f64 {
    let bits = match dtype {
        _ if row.identity == Identity::RoundingLess => 8,
        DType::F64 => 52,
        DType::F32 => 24,
        DType::F16 => 11,
        _ => 8,
    };
    2f64.powi(-bits)
}

/// The attributes of each collective over one rank, which gives `[4,8]` of `[4,8]`, and what can come behind them.
fn alone(prim: Prim) -> (&'static str, &'static [&'static str]) {
    match prim {
        Prim::AllReduce => ("all_reduce", &["red=sum", "red=prod", "red=min", "red=max", "red=avg"]),
        Prim::ReduceScatter => ("reduce_scatter", &["red=sum", "red=prod", "red=min", "red=max", "red=avg"]),
        Prim::AllGather => ("all_gather", &[""]),
        Prim::AllToAll => ("all_to_all", &["", "sends=[4] receives=[4]"]),
        Prim::Broadcast => ("broadcast", &["root=0"]),
        Prim::ShardDimAllToAll => ("shard_dim_all_to_all", &["dims=[0,1]"]),
    }
}

#[test]
fn every_collective_of_one_rank_gives_what_the_rank_has() {
    let mut state = 9u64;
    let mut random = || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 11) as f64 / 2f64.powi(53)
    };
    let prims = [
        Prim::AllReduce,
        Prim::ReduceScatter,
        Prim::AllGather,
        Prim::AllToAll,
        Prim::Broadcast,
        Prim::ShardDimAllToAll,
    ];
    for (prim, dtype) in prims.into_iter().flat_map(|prim| DTYPES.map(|dtype| (prim, dtype))) {
        let (name, attributes) = alone(prim);
        let bits = ["red=band", "red=bor", "red=bxor"].into_iter();
        let bits = bits.filter(|_| attributes.len() > 2 && !dtype.is_float());
        for attributes in attributes.iter().copied().chain(bits) {
            let of = |body: &str| {
                let inputs =
                    ["x", "y", "z"].map(|name| format!("%{name}: {dtype}[4,8] = input()\n")).concat();
                let text = format!("group one size 1\n{inputs}%r: {dtype}[4,8] = {body}\nreturn %r");
                let graph = Graph::from_text(&text).unwrap();
                assert_eq!(verify(&graph), [], "{text}");
                graph
            };
            let sides = [of(&format!("sync(%x) prim={name} group=one {attributes}")), of("copy(%x)")];
            for numerics in [Numerics::Same, Numerics::Close] {
                assert!(are_one(Enabled::all(numerics), numerics, &sides), "{name} {attributes} {dtype}");
                let without = Enabled::without(numerics, Identity::RankAlone);
                assert!(!are_one(without, numerics, &sides), "{name} {attributes} {dtype}");
            }
            let given = inputs(dtype, &mut random);
            let [left, right] = sides.map(|side| interpret(&side, &given, Arithmetic::Kernels).unwrap());
            assert_eq!(left, right, "{name} {attributes} {dtype}");
        }
    }
}

#[test]
fn numbers_of_integers_wrap_when_they_are_joined() {
    let value = |body: &str, numerics| {
        let text = format!("%x: i8[4] = input()\n{body}\nreturn %r");
        let graph = Graph::from_text(&text).unwrap();
        assert_eq!(verify(&graph), []);
        (graph, numerics)
    };
    let twice = "%a: i8[4] = binary(%x) op=add scalar=100\n%r: i8[4] = binary(%a) op=add scalar=100";
    for (once, equal) in [("-56", true), ("127", false)] {
        let (left, _) = value(twice, Numerics::Same);
        let (right, numerics) =
            value(&format!("%r: i8[4] = binary(%x) op=add scalar={once}"), Numerics::Same);
        assert_eq!(are_one(Enabled::all(numerics), numerics, &[left, right]), equal, "{once}");
    }
    assert_eq!(Element::from(DType::I8).to_string(), "i8");
}
