//! Two programs on the same numbers: differences are told, and roundings that the numerics allow are none.

mod common;

use antiphon_lowering::{Difference, Numerics, Opinion, compare, second_opinion};
use common::graph;

/// The difference that is too large, if a run finds one.
fn found(before: &str, after: &str, numerics: Numerics) -> Option<Difference> {
    let [before, after] = [before, after].map(graph);
    let runs = [2, 3].map(|seed| compare(&before, &after, numerics, seed).unwrap());
    runs.into_iter().flatten().find(Difference::is_too_large)
}

fn are_told(before: &str, after: &str) {
    for numerics in [Numerics::Same, Numerics::Close] {
        assert!(found(before, after, numerics).is_some(), "{numerics:?}\n{before}\n{after}");
        assert!(found(before, before, numerics).is_none(), "{numerics:?}\n{before}");
    }
}

#[test]
fn small_elements_count_as_large_ones_do() {
    let scaled =
        |by: &str| format!("%x: f32[4] = input()\n%y: f32[4] = binary(%x) op=mul scalar={by}\nreturn %y");
    are_told(&scaled("1e-7"), &scaled("-1e-7"));
    // One beside a large one in the same output.
    let beside = |by: &str| {
        format!(
            "%x: f32[4] = input()\n%c: f32[5] = full() value=20000000\n%v: f32[4] = view(%c) view=strided\n\
             %z: f32[4] = binary(%x) op=mul scalar={by}\n%w: f32[4] = assign(%v, %z)\n%r: f32[5] = view(%w) view=strided\nreturn %r"
        )
    };
    are_told(&beside("1"), &beside("2"));
}

#[test]
fn integers_and_truth_values_are_equal_or_not() {
    let beside = |by: &str| {
        format!(
            "%x: i32[4] = input()\n%c: i32[5] = full() value=20000000\n%v: i32[4] = view(%c) view=strided\n\
             %z: i32[4] = binary(%x) op=add scalar={by}\n%w: i32[4] = assign(%v, %z)\n%r: i32[5] = view(%w) view=strided\nreturn %r"
        )
    };
    are_told(&beside("0"), &beside("1"));
    let truth = |by: &str| {
        format!(
            "%x: i32[64] = input()\n%y: i32[64] = binary(%x) op=add scalar={by}\n%r: bool[64] = cast(%y)\nreturn %r"
        )
    };
    are_told(&truth("0"), &truth("1"));
}

/// An added rounding is a difference under both numerics; one that is dropped only under `same`.
#[test]
fn roundings_that_a_program_has_not_are_told() {
    for (narrow, wide) in [
        (
            "%h: T[4,8] = binary(%x, %x) op=mul\n%r: f32[4,8] = cast(%h)",
            "%w: f32[4,8] = cast(%x)\n%r: f32[4,8] = binary(%w, %w) op=mul",
        ),
        (
            "%h: T[4] = reduce(%x) op=sum dims=[1]\n%r: f32[4] = cast(%h)",
            "%r: f32[4] = reduce(%x) op=sum dims=[1]",
        ),
    ] {
        for dtype in ["f16", "bf16"] {
            let [narrow, wide] = [narrow, wide]
                .map(|body| format!("%x: T[4,8] = input()\n{body}\nreturn %r").replace('T', dtype));
            are_told(&wide, &narrow);
            assert!(found(&narrow, &wide, Numerics::Same).is_some());
            assert!(found(&narrow, &wide, Numerics::Close).is_none());
        }
    }
    // The result has as many roundings before as there are bits to hide another one.
    let result = |inside: &str| {
        format!(
            "%x: f32[4,8] = input()\n%y: f32[4,8] = input()\n%p: f32[4,8] = binary(%x, %y) op=mul\n{inside}\n\
             %s: f32[4,8] = binary(%q, %y) op=add\n%r: bf16[4,8] = cast(%s)\nreturn %r"
        )
    };
    let plain = result("%q: f32[4,8] = unary(%p) op=neg");
    let rounded = result("%h: bf16[4,8] = cast(%p)\n%q: f32[4,8] = unary(%h) op=neg");
    assert!(found(&plain, &rounded, Numerics::Same).is_some());
    let f64s = |inside: &str| {
        format!("%x: f64[4] = input()\n%y: f64[4] = binary(%x, %x) op=mul\n{inside}\nreturn %r")
    };
    are_told(&f64s("%r: f64[4] = copy(%y)"), &f64s("%n: f32[4] = cast(%y)\n%r: f64[4] = cast(%n)"));
}

/// Sums and products in another order differ by no more than their own roundings, also where most of a result is cancelled.
#[test]
fn an_order_is_no_difference_under_close() {
    let of = |body: &str| {
        format!("%x: f32[8,8] = input()\n%y: f32[8,8] = input()\n%z: f32[8,8] = input()\n{body}\nreturn %r")
    };
    let left = of(
        "%a: f32[8,8] = binary(%x, %y) op=add\n%b: f32[8,8] = binary(%a, %z) op=add\n%r: f32[8,8] = binary(%b, %y) op=sub",
    );
    let right = of(
        "%a: f32[8,8] = binary(%z, %y) op=add\n%b: f32[8,8] = binary(%x, %a) op=add\n%r: f32[8,8] = binary(%b, %y) op=sub",
    );
    assert!(found(&left, &right, Numerics::Close).is_none());
    assert!(found(&left, &right, Numerics::Same).is_some());
    // The mean of 24 numbers and their sum times the number nearest to 1 / 24, less most of it.
    let mean = |how: &str| {
        format!(
            "%x: f32[8,24] = input()\n{how}\n%d: f32[8] = binary(%m) op=sub scalar=0.25\n%r: f32[8] = binary(%d) op=mul scalar=4096\nreturn %r"
        )
    };
    let one = mean("%m: f32[8] = reduce(%x) op=mean dims=[1]");
    let other = mean(
        "%s: f32[8] = reduce(%x) op=sum dims=[1]\n%m: f32[8] = binary(%s) op=mul scalar=0.041666666666666664",
    );
    assert!(found(&one, &other, Numerics::Close).is_none());
}

#[test]
fn symbols_have_values_that_differ() {
    let of = |size: &str| {
        graph(&format!(
            "sym s0 min 1 max 9 hint 4\nsym s1 min 1 max 9 hint 4\n%x: f32[s0] = input()\n%y: f32[s1] = input()\n%r: f32[{size}] = full() value=1\nreturn %r"
        ))
    };
    let opinion = |after: &str| second_opinion(&of("s0"), &of(after), Numerics::Close);
    assert_eq!(opinion("s0"), Opinion::Equal);
    assert!(matches!(opinion("s1"), Opinion::Different(found) if found.values == [3.0, 4.0]));
}
