//! Roundings and constants: which of them the proof tells apart, and what a fused call is.

mod common;

use antiphon_lowering::{Decisions, Graph, Kind, Numerics, Options, check};
use common::{graph, kinds, lowered, numerics};

/// Why one program is not shown to be another.
fn findings(before: &Graph, after: &Graph, how: Numerics) -> Vec<String> {
    let decisions: Decisions = lowered(before, &numerics(how)).decisions;
    check(before, &decisions, after).into_iter().map(|finding| finding.text).collect()
}

fn close(before: &str, after: &str) -> Vec<String> {
    findings(&graph(before), &graph(after), Numerics::Close)
}

/// Arithmetic in f32 whose result is rounded to the narrower elements of its operands.
#[test]
fn results_that_are_rounded_count() {
    let head =
        "%x: T[4,8] = input()\n%w: f32[4,8] = cast(%x)\n%z: T[8,4] = input()\n%v: f32[8,4] = cast(%z)\n";
    for (narrow, wide, shape) in [
        ("binary(%x, %x) op=mul", "binary(%w, %w) op=mul", "[4,8]"),
        ("binary(%x) op=add scalar=300", "binary(%w) op=add scalar=300", "[4,8]"),
        ("unary(%x) op=exp", "unary(%w) op=exp", "[4,8]"),
        ("reduce(%x) op=sum dims=[1]", "reduce(%w) op=sum dims=[1]", "[4]"),
        ("reduce(%x) op=mean dims=[1]", "reduce(%w) op=mean dims=[1]", "[4]"),
        ("matmul(%x, %z)", "matmul(%w, %v)", "[4,4]"),
    ] {
        for dtype in ["f16", "bf16"] {
            let narrow = format!("{head}%h: T{shape} = {narrow}\n%r: f32{shape} = cast(%h)\nreturn %r");
            let wide = format!("{head}%r: f32{shape} = {wide}\nreturn %r");
            let [narrow, wide] = [narrow, wide].map(|text| text.replace('T', dtype));
            let refused = format!("output 0: it is rounded to {dtype}, which r was not");
            assert_eq!(close(&wide, &narrow), [refused], "{narrow}");
            assert_eq!(close(&narrow, &wide), [""; 0], "a rounding is dropped: {narrow}");
        }
    }
    // An integer that has been rounded on the way is one as well.
    let of = |dtype: &str| {
        format!(
            "%x: i8[4,8] = input()\n%w: {dtype}[4,8] = cast(%x)\n%m: {dtype}[4,8] = binary(%w, %w) op=mul\n%r: i32[4,8] = cast(%m)\nreturn %r"
        )
    };
    assert_eq!(close(&of("f32"), &of("bf16")).len(), 1);
}

/// What rounds nothing does not make room for a rounding.
#[test]
fn exact_results_count_for_nothing() {
    let head = "group tp size 2\ngroup one size 1\n%x: bf16[4,8] = input()\n%wide: f32[4,8] = cast(%x)\n";
    let tail = "%w: f32[4,8] = cast(%h)\n%q: f32[4,8] = binary(%w, %w) op=mul\n";
    let (plain, rounded) = ("return %q", "%n: bf16[4,8] = cast(%q)\n%r: f32[4,8] = cast(%n)\nreturn %r");
    for exact in [
        "cast(%wide)",
        "unary(%x) op=neg",
        "unary(%x) op=relu",
        "binary(%x, %x) op=maximum",
        "binary(%x) op=minimum scalar=2",
        "sync(%x) prim=all_reduce group=tp red=max",
        "sync(%x) prim=all_reduce group=one red=sum",
    ] {
        let of = |end: &str| format!("{head}%h: bf16[4,8] = {exact}\n{tail}{end}");
        let (before, after) = (of(plain), of(rounded));
        let found = close(&before, &after);
        assert!(found.iter().any(|text| text.contains("it is rounded to bf16")), "{exact}: {found:?}");
    }
}

/// The list of roundings is one of a value, not of each of its parts.
#[test]
fn what_is_added_to_a_rounded_sum_may_be_rounded() {
    let head = "group tp size 2\n%x: bf16[4,8] = input()\n%res: f32[4,8] = input()\n\
                %s: bf16[4,8] = sync(%x) prim=all_reduce group=tp red=sum\n%w: f32[4,8] = cast(%s)\n";
    let before = format!("{head}%r: f32[4,8] = binary(%w, %res) op=add\nreturn %r");
    let after = format!(
        "{head}%h: bf16[4,8] = cast(%res)\n%k: f32[4,8] = cast(%h)\n%r: f32[4,8] = binary(%w, %k) op=add\nreturn %r"
    );
    assert_eq!(close(&before, &after), [""; 0]);
    let narrower = after.replace("%h: bf16", "%h: f16");
    assert_eq!(close(&before, &narrower).len(), 1);
}

#[test]
fn numbers_are_joined_only_exactly() {
    let f32s = |body: &str| format!("%x: f32[4] = input()\n{body}\nreturn %r");
    let [one, joined] = [
        f32s("%r: f32[4] = binary(%x) op=add scalar=0"),
        f32s(
            "%a: f32[4] = binary(%x) op=add scalar=16777216\n%b: f32[4] = binary(%a) op=add scalar=1\n%r: f32[4] = binary(%b) op=add scalar=-16777216",
        ),
    ];
    assert_eq!(close(&one, &joined), ["output 0 has another meaning than r"]);
    // The products of the constants are 0, 1, and infinity in f32.
    for (once, factors) in [
        ("0", &["1e-30", "1e-30", "1e30", "1e30"][..]),
        (
            "1",
            &[
                "7.888609052210118e-31",
                "7.888609052210118e-31",
                "1.2676506002282294e30",
                "1.2676506002282294e30",
            ],
        ),
        (
            "1",
            &[
                "1.2676506002282294e30",
                "1.2676506002282294e30",
                "7.888609052210118e-31",
                "7.888609052210118e-31",
            ],
        ),
        ("\"inf\"", &["1e30", "1e30"]),
    ] {
        let mut body = String::new();
        for (at, factor) in factors.iter().enumerate() {
            let (from, to) = (if at == 0 { "x".into() } else { format!("v{at}") }, at + 1);
            let to = if to == factors.len() { "r".into() } else { format!("v{to}") };
            body += &format!("%{to}: f32[4] = binary(%{from}) op=mul scalar={factor}\n");
        }
        let (once, many) = (f32s(&format!("%r: f32[4] = binary(%x) op=mul scalar={once}")), f32s(&body));
        assert_eq!(close(&once, &many), ["output 0 has another meaning than r"], "{many}");
        assert_eq!(close(&many, &many), [""; 0]);
    }
    let squares = |number: &str| {
        f32s(&format!(
            "%u: f32[4] = binary(%x) op=mul scalar=1e20\n%v: f32[4] = unary(%u) op=abs\n%s: f32[4] = binary(%v) op=add scalar=1e20\n\
             %q: f32[4] = unary(%s) op=neg\n{number}"
        ))
    };
    let zero = squares("%z: f32[4] = binary(%s) op=mul scalar=0\n%r: f32[4] = binary(%z, %q) op=mul");
    let tiny = squares(
        "%p: f32[4] = binary(%s) op=mul scalar=1e-30\n%k: f32[4] = binary(%q) op=mul scalar=1e-30\n\
         %m: f32[4] = binary(%p, %k) op=mul\n%r: f32[4] = binary(%m) op=mul scalar=1e20",
    );
    assert_eq!(close(&zero, &tiny), ["output 0 has another meaning than r"]);
    // What is exact is joined.
    let twice = f32s("%a: f32[4] = binary(%x) op=mul scalar=0.1\n%r: f32[4] = binary(%a) op=mul scalar=4");
    assert_eq!(close(&twice, &f32s("%r: f32[4] = binary(%x) op=mul scalar=0.4")), [""; 0]);
}

/// A sum, then `inverse` of it, the norm, and codes of groups of 16 with `scales`.
fn block(inverse: &str, scales: &str) -> String {
    format!(
        "group tp size 2
         %x: f32[3,64] = input()
         %start: f32[3,64] = start(%x) prim=all_reduce group=tp red=sum token=0
         %sum: f32[3,64] = wait(%start) tokens=[0]
         %square: f32[3,64] = binary(%sum) op=pow scalar=2.0
         {inverse}
         %norm: f32[3,64] = binary(%sum, %inverse) op=mul
         {scales}"
    )
}

const USUAL: &str = "%mean: f32[3,1] = reduce(%square) op=mean dims=[1] keepdim=true
     %eps: f32[3,1] = binary(%mean) op=add scalar=1e-6
     %inverse: f32[3,1] = unary(%eps) op=rsqrt";
const KERNELS: &str = "%total: f32[3,1] = reduce(%square) op=sum dims=[1] keepdim=true
     %mean: f32[3,1] = binary(%total) op=mul scalar=0.015625
     %eps: f32[3,1] = binary(%mean) op=add scalar=1e-6
     %root: f32[3,1] = unary(%eps) op=sqrt
     %inverse: f32[3,1] = unary(%root) op=reciprocal";
const CODES: &str = "%split: f32[3,4,16] = view(%norm) view=reshape
     %abs: f32[3,4,16] = unary(%split) op=abs
     %amax: f32[3,4] = reduce(%abs) op=amax dims=[2]
     %raw: f32[3,4] = binary(%amax) op=div scalar=448.0
     %least: f32[3,4] = binary(%raw) op=maximum scalar=1e-10
     %log: f32[3,4] = unary(%least) op=log2
     %ceil: f32[3,4] = unary(%log) op=ceil
     %scales: f32[3,4] = unary(%ceil) op=exp2
     %column: f32[3,4,1] = view(%scales) view=reshape
     %scaled_up: f32[3,4,16] = binary(%split, %column) op=div
     %low: f32[3,4,16] = binary(%scaled_up) op=maximum scalar=-448.0
     %high: f32[3,4,16] = binary(%low) op=minimum scalar=448.0
     %narrow: e4m3[3,4,16] = cast(%high)
     %codes: e4m3[3,64] = view(%narrow) view=reshape
     return %codes, %scales";

/// The kernels multiply a sum with `1 / n`, take a root and then its reciprocal, and round scales up to powers of two among bits. Under
/// `same` only a program with these steps is fused; under `close` all are.
#[test]
fn the_steps_of_a_fused_call_are_those_of_the_kernels() {
    let fuses = |inverse: &str, rest: &str, how: Numerics| {
        let after = lowered(&graph(&block(inverse, rest)), &numerics(how));
        kinds(&after.graph).contains(&"fused".to_owned())
    };
    for inverse in [USUAL, KERNELS] {
        assert!(fuses(inverse, "return %norm", Numerics::Close));
        assert!(fuses(inverse, CODES, Numerics::Close));
    }
    assert!(!fuses(USUAL, "return %norm", Numerics::Same));
    assert!(fuses(KERNELS, "return %norm", Numerics::Same));
    let half = KERNELS.replace("unary(%root) op=reciprocal", "unary(%eps) op=rsqrt");
    assert!(!fuses(&half, "return %norm", Numerics::Same));
    let half = KERNELS
        .replace("binary(%total) op=mul scalar=0.015625", "reduce(%square) op=mean dims=[1] keepdim=true");
    assert!(!fuses(&half, "return %norm", Numerics::Same));
    // The norm is the call's, and its codes stay.
    let before = graph(&block(KERNELS, CODES));
    let after = lowered(&before, &numerics(Numerics::Same));
    let outputs = after.graph.ops.iter().find_map(|op| match &op.kind {
        Kind::Fused { fused } => Some(fused.outputs.len()),
        _ => None,
    });
    assert_eq!(outputs, Some(1), "{}", after.report);
    assert!(kinds(&after.graph).contains(&"unary".to_owned()));
}

/// What is proved under `same` is so for programs that have the fused call already.
#[test]
fn a_logarithm_is_no_power_under_same() {
    let spelled = graph(&block(KERNELS, CODES));
    let fused = lowered(&spelled, &Options::default()).graph;
    let found = findings(&spelled, &fused, Numerics::Same);
    assert!(found.iter().any(|text| text.contains("another meaning")), "{found:?}");
}
