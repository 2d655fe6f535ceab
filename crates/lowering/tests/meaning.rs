//! What a program means: two values that look alike are told apart, and what has no meaning is refused.

mod common;

use antiphon_lowering::{Choice, Decisions, Graph, Kind, Numerics, Options, check, compare, verify};
use common::{graph, lowered};

/// Two calls on `%a` and `%b` of these elements, which a body computes from `%x` and `%y`, and their difference.
fn twins(dtype: &str, shape: &str, body: &str) -> String {
    format!(
        "group tp size 2
         {body}
         %s0: {dtype}{shape} = start(%a) prim=all_reduce group=tp red=max token=0
         %w0: {dtype}{shape} = wait(%s0) tokens=[0]
         %s1: {dtype}{shape} = start(%b) prim=all_reduce group=tp red=max token=1
         %w1: {dtype}{shape} = wait(%s1) tokens=[1]
         return %w0, %w1"
    )
}

/// The program as it is, and with its second output replaced by the first: which the proof must refuse.
fn are_told_apart(text: &str) {
    let before = graph(text);
    for numerics in [Numerics::Same, Numerics::Close] {
        let after = lowered(&before, &Options { numerics, ..Options::default() });
        assert_eq!(after.report.calls, [2, 2], "{}", after.report);
        let found = compare(&before, &after.graph, numerics, 3).unwrap();
        assert!(found.is_none_or(|found| !found.is_too_large()));
        let mut wrong = after.graph.clone();
        wrong.outputs[1] = wrong.outputs[0];
        let findings = check(&before, &after.decisions, &wrong);
        assert!(
            findings.iter().any(|finding| finding.text.contains("another meaning")),
            "{numerics:?} {text}"
        );
        assert!(compare(&before, &wrong, numerics, 4).unwrap().unwrap().is_too_large(), "{text}");
    }
}

fn refused(text: &str) -> String {
    let findings = verify(&Graph::from_text(text).unwrap());
    assert!(!findings.is_empty(), "{text}");
    findings[0].to_string()
}

/// A reduction over two dimensions, as a column and as a row.
const COLUMN_AND_ROW: &str = "
    %x: f32[4,2,2] = input()
    %y: f32[4,4] = input()
    %r: f32[4,1,1] = reduce(%x) op=sum dims=[1,2] keepdim=true
    %v: f32[4,1] = view(%r) view=reshape
    %a: f32[4,4] = binary(%y, %v) op=add
    %q: f32[4] = reduce(%x) op=sum dims=[1,2]
    %b: f32[4,4] = binary(%y, %q) op=add";

#[test]
fn a_column_is_no_row() {
    are_told_apart(&twins("f32", "[4,4]", COLUMN_AND_ROW));
    // A reduction that keeps its dimensions is the same as one that does not, if both become columns.
    let text = COLUMN_AND_ROW.replace(
        "%b: f32[4,4] = binary(%y, %q)",
        "%u: f32[4,1] = view(%q) view=reshape\n%b: f32[4,4] = binary(%y, %u)",
    );
    let before = graph(&twins("f32", "[4,4]", &text));
    let mut equal = before.clone();
    equal.outputs[1] = equal.outputs[0];
    let findings = check(&before, &lowered(&before, &Options::default()).decisions, &equal);
    assert!(findings.iter().all(|finding| !finding.text.contains("another meaning")), "{findings:?}");
}

#[test]
fn a_write_of_a_slice_leaves_the_rest() {
    are_told_apart(&twins(
        "f32",
        "[4,8]",
        "%x: f32[4,8] = input()
         %y: f32[2,8] = input()
         %c: f32[4,8] = unary(%x) op=neg
         %s: f32[2,8] = view(%c) view=strided
         %w: f32[2,8] = assign(%s, %y)
         %a: f32[4,8] = view(%w) view=strided
         %d: f32[4,8] = unary(%x) op=abs
         %t: f32[2,8] = view(%d) view=strided
         %z: f32[2,8] = assign(%t, %y)
         %b: f32[4,8] = view(%z) view=strided",
    ));
}

#[test]
fn views_of_other_places_are_others() {
    for view in [
        "f32[4,4] offset 4",
        "f32[4,4] strides [8,1]",
        "f32[4,4] strides [8,2]",
        "f32[4,4] strides [1,4]",
        "f32[4,4] strides [0,1]",
        "f32[4,4] strides [4,1] offset 16",
    ] {
        are_told_apart(&twins(
            "f32",
            "[4,4]",
            &format!(
                "%x: f32[4,8] = input()
                 %a: f32[4,4] = view(%x) view=strided
                 %b: {view} = view(%x) view=strided"
            ),
        ));
    }
}

#[test]
fn a_reshape_has_its_operand_s_places_and_an_expansion_too() {
    let head = "%x: f32[4,8] = input()\n%c: f32[4,1] = input()\n";
    for (view, fits) in [
        ("f32[32] = view(%x) view=reshape", true),
        ("f32[8,4] = view(%x) view=reshape", true),
        ("f32[4,1,8] strides [8,8,1] = view(%x) view=reshape", true),
        ("f32[8,4] strides [1,8] = view(%x) view=reshape", false),
        ("f32[4,8] offset 8 = view(%x) view=reshape", false),
        ("f32[4,4,2] strides [8,1,4] = view(%x) view=reshape", false),
        ("f32[4,8] strides [1,0] = view(%c) view=expand", true),
        ("f32[4,8] strides [0,1] = view(%c) view=expand", false),
        ("f32[4,8] strides [1,1] = view(%c) view=expand", false),
        ("f32[8,4] strides [1,8] = view(%x) view={\"permute\":[1,0]}", true),
        ("f32[8,4] = view(%x) view={\"permute\":[1,0]}", false),
        ("f32[4,8] strides [8,0] = view(%x) view=expand", false),
    ] {
        let findings = verify(&Graph::from_text(&format!("{head}%d: {view}\nreturn %d")).unwrap());
        assert_eq!(findings.is_empty(), fits, "{view}: {findings:?}");
    }
    let text = refused(&format!("{head}%d: f32[8,4] strides [1,8] = view(%x) view=reshape\nreturn %d"));
    assert_eq!(text, "d: the view is f32[8,4] strides [1,8], wanted f32[4,8]");
}

#[test]
fn integers_wrap_in_the_elements_in_which_they_are_computed() {
    let wide = "%x: i8[4,4] = input()\n%a: i8[4,4] = binary(%x, %x) op=add\n%b: i32[4,4] = cast(%a)\n";
    let sum = "%w: i32[4,4] = cast(%x)\n%c: i32[4,4] = binary(%w, %w) op=add";
    let text = twins(
        "i32",
        "[4,4]",
        &format!("{wide}{sum}").replace("%a", "%n").replace("%b", "%a").replace("%c", "%b"),
    );
    are_told_apart(&text);
    let text = refused(&format!("{wide}%c: i32[4,4] = binary(%x, %x) op=add\nreturn %c"));
    assert_eq!(text, "c: it computes in i8, and its result is of i32");
    for (op, why) in [
        ("%c: f32[4,4] = binary(%x, %b) op=div", "Div of i8 and i32"),
        ("%c: i8[4,4] = binary(%x) op=add scalar=300", "the number 300 is none of i8"),
        ("%c: i8[4,4] = binary(%x) op=add scalar=0.5", "the number 0.5 is none of i8"),
        (
            "%l: i64[4,4] = cast(%x)\n%c: i64[4,4] = binary(%l) op=add scalar=9223372036854775808",
            "the number 9223372036854776000 is none of i64",
        ),
        ("%f: f32[4,4] = cast(%x)\n%c: f32[4,4] = binary(%x, %f) op=add", "Add of i8 and f32"),
        ("%f: u8[4,4] = cast(%x)\n%c: i32[4,4] = binary(%x, %f) op=add", "Add of i8 and u8"),
        ("%c: f32[4,4] = unary(%x) op=rsqrt", "Rsqrt of i8"),
        ("%c: f32[4] = reduce(%x) op=mean dims=[1]", "Mean of i8"),
        ("%f: bool[4,4] = cast(%x)\n%c: bool[4,4] = binary(%f, %f) op=mul", "Mul of bool and bool"),
    ] {
        let text = refused(&format!("{wide}{op}\nreturn %c"));
        assert!(text.contains(why), "{op}: {text}");
    }
}

#[test]
fn a_slot_has_room_for_the_gaps() {
    let before = graph(
        "group tp size 2
         %x: f32[16,8] = input()
         %p: f32[16,8] = unary(%x) op=neg
         %s0: f32[16,8] = start(%p) prim=all_reduce group=tp red=sum token=0
         %r0: f32[16,8] = wait(%s0) tokens=[0]
         return %r0",
    );
    let options = Options { realize: antiphon_lowering::Realize::Always, ..Options::default() };
    let after = lowered(&before, &options);
    assert_eq!(after.decisions.calls[0].choice, Choice::Registered);
    let [slot] = &after.decisions.slots[..] else { panic!("one slot") };
    assert_eq!(slot.bytes, 16 * 8 * 4);
    // The same operand with strides reaches to element 15 · 16 + 7.
    let mut strided = after.graph.clone();
    let value = strided.values.iter_mut().find(|value| value.name == slot.value).unwrap();
    value.ty.strides = Some(vec![16.into(), 1.into()]);
    let findings = check(&before, &after.decisions, &strided);
    assert!(findings.iter().any(|finding| finding.text.contains("Some(992) bytes")), "{findings:?}");
    let mut decisions = after.decisions.clone();
    decisions.slots[0].bytes = 1024;
    decisions.calls[0].signature = decisions.calls[0].signature.replace("512 bytes", "1024 bytes");
    assert_eq!(check(&before, &decisions, &strided), []);
}

#[test]
fn memory_between_elements_is_not_read_and_elements_in_one_place_are_not_written() {
    let gaps = "%x: f32[4,8] = input()\n%p: f32[4,8] strides [16,1] = unary(%x) op=neg\n";
    assert!(
        refused(&format!("{gaps}%d: f32[64] = view(%p) view=strided\nreturn %d")).contains("ends at element")
    );
    let text = refused(&format!("{gaps}%d: f32[4,16] strides [8,1] = view(%p) view=strided\nreturn %d"));
    assert!(text.contains("memory between the elements of f32[4,8] strides [16,1]"), "{text}");
    graph(&format!("{gaps}%d: f32[2,4] strides [32,1] offset 18 = view(%p) view=strided\nreturn %d"));
    let twice = "%x: f32[4,8] = input()\n%p: f32[4,8] = unary(%x) op=neg\n%v: f32[4,8] strides [4,1] = view(%p) view=strided\n\
                 %w: f32[4,8] strides [4,1] = assign(%v, %x)\nreturn %w";
    assert!(refused(twice).contains("may lie in one place"), "{}", refused(twice));
    let repeated = "%x: f32[4,8] = input()\n%p: f32[4,8] strides [8,0] = unary(%x) op=neg\nreturn %p";
    assert!(refused(repeated).contains("elements of f32[4,8] strides [8,0] may lie in one place"));
}

#[test]
fn constants_are_compared_as_their_elements_have_them() {
    for (dtype, one, other) in [
        ("f64", "0.1", "0.10000000000000002"),
        ("f64", "0.1", "0.10000000149011612"),
        ("f32", "0.1", "0.10000001"),
    ] {
        are_told_apart_closely(&twins(
            dtype,
            "[4]",
            &format!(
                "%x: {dtype}[4] = input()
                 %a: {dtype}[4] = binary(%x) op=add scalar={one}
                 %b: {dtype}[4] = binary(%x) op=add scalar={other}"
            ),
        ));
    }
}

/// The same for values whose difference is less than [`compare`] sees.
fn are_told_apart_closely(text: &str) {
    let before = graph(text);
    for numerics in [Numerics::Same, Numerics::Close] {
        let after = lowered(&before, &Options { numerics, ..Options::default() });
        let mut wrong = after.graph.clone();
        wrong.outputs[1] = wrong.outputs[0];
        let findings = check(&before, &after.decisions, &wrong);
        assert!(
            findings.iter().any(|finding| finding.text.contains("another meaning")),
            "{numerics:?} {text}"
        );
    }
}

#[test]
fn no_rounding_is_new() {
    let program = |body: &str| graph(&format!("group tp size 2\n%x: f32[4,8] = input()\n{body}\nreturn %r"));
    let plain = program("%a: f32[4,8] = binary(%x, %x) op=mul\n%r: f32[4,8] = binary(%a) op=add scalar=1");
    let narrow = |dtype: &str| {
        program(&format!(
            "%a: f32[4,8] = binary(%x, %x) op=mul\n%n: {dtype}[4,8] = cast(%a)\n%w: f32[4,8] = cast(%n)\n%r: f32[4,8] = binary(%w) op=add scalar=1"
        ))
    };
    let moved = program(
        "%n: bf16[4,8] = cast(%x)\n%w: f32[4,8] = cast(%n)\n%a: f32[4,8] = binary(%w, %w) op=mul\n%r: f32[4,8] = binary(%a) op=add scalar=1",
    );
    let close = |before: &Graph, after: &Graph| {
        let decisions: Decisions = lowered(before, &Options::default()).decisions;
        check(before, &decisions, after).into_iter().map(|finding| finding.text).collect::<Vec<_>>()
    };
    for dtype in ["bf16", "f16"] {
        let refused = format!("output 0: it is rounded to {dtype}, which r was not");
        assert_eq!(close(&plain, &narrow(dtype)), [refused]);
        assert_eq!(close(&narrow(dtype), &plain), [""; 0], "a rounding is dropped");
    }
    assert_eq!(close(&narrow("bf16"), &moved), [""; 0], "a rounding is elsewhere");
    assert_eq!(close(&narrow("bf16"), &narrow("f16")).len(), 1, "f16 has other numbers");
    assert!(
        !close(
            &plain,
            &program("%a: f32[4,8] = binary(%x, %x) op=mul\n%r: f32[4,8] = binary(%a) op=add scalar=2")
        )
        .is_empty()
    );
}

#[test]
fn ranks_reduce_numbers_and_bits_of_integers() {
    let call = |dtype: &str, red: &str| {
        format!(
            "group tp size 2\n%x: {dtype}[4] = input()\n%o: {dtype}[4] = sync(%x) prim=all_reduce group=tp red={red}\nreturn %o"
        )
    };
    for (dtype, red) in [("f32", "avg"), ("i32", "band"), ("u8", "bxor"), ("bf16", "max"), ("i64", "prod")] {
        graph(&call(dtype, red));
    }
    for (dtype, red, why) in [
        ("f32", "band", "o: the reduction Band of f32"),
        ("bf16", "bor", "o: the reduction Bor of bf16"),
        ("bool", "sum", "o: the reduction Sum of bool"),
        ("e4m3", "sum", "o: the reduction Sum of e4m3"),
        ("opaque16", "max", "o: the reduction Max of opaque16"),
    ] {
        assert_eq!(refused(&call(dtype, red)), why);
    }
}

#[test]
fn a_product_of_matrices_is_of_equal_elements() {
    let head = "%x: f32[4,8] = input()\n%y: bf16[8,4] = input()\n%z: i32[8,4] = cast(%y)\n";
    assert!(
        refused(&format!("{head}%d: f32[4,4] = matmul(%x, %y)\nreturn %d"))
            .contains("a product of f32 and bf16")
    );
    assert!(refused(&format!("{head}%d: i32[8,8] = matmul(%z, %z)\nreturn %d")).contains("a product of i32"));
    assert!(
        Kind::MatMul
            == graph(
                "%x: f32[4,8] = input()\n%y: f32[8,4] = input()\n%d: f32[4,4] = matmul(%x, %y)\nreturn %d"
            )
            .ops[2]
                .kind
    );
}
