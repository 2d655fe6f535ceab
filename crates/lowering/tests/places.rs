//! Where elements lie: places that depend on symbols, results that share memory, and memory that is too small.

mod common;

use antiphon_lowering::{
    Costs, Decisions, Graph, Lowered, Numerics, Options, Realize, World, check, compare, lower, verify,
};
use common::{graph, lowered};

/// What is wrong with a program in place of another one, with decisions that list its calls.
fn differences(before: &str, after: &str) -> Vec<String> {
    let [before, after] = [before, after].map(graph);
    let decisions = |graph: &Graph| lowered(graph, &Options::default()).decisions;
    let decisions = Decisions {
        calls: decisions(&after).calls,
        rewrites: Vec::new(),
        slots: Vec::new(),
        ..decisions(&before)
    };
    check(&before, &decisions, &after).into_iter().map(|finding| finding.text).collect()
}

/// Two programs that give other results are told apart, and a program is not told from itself.
fn are_told_apart(one: &str, other: &str) {
    let [before, after] = [one, other].map(graph);
    assert!(compare(&before, &after, Numerics::Same, 3).unwrap().unwrap().is_too_large(), "{one}{other}");
    let found = differences(one, other);
    assert!(found.iter().any(|text| text.contains("another meaning")), "{found:?}\n{one}{other}");
    assert_eq!(differences(one, one), [""; 0]);
}

fn refused(text: &str) -> String {
    let findings = verify(&Graph::from_text(text).unwrap());
    assert!(!findings.is_empty(), "{text}");
    findings[0].to_string()
}

fn always(before: &Graph) -> Lowered {
    let options = Options { realize: Realize::Always, ..Options::default() };
    let world = World::default();
    lower(before, &world, &Costs::of(world.device), &options)
}

#[test]
fn rows_of_a_symbolic_number_are_not_all_rows() {
    let rows = |least: u32, function: &str| {
        format!(
            "sym s0 min {least} max 9 hint {least}
             %x: f32[16,8] = input()
             %y: f32[s0,4] = input()
             %c: f32[16,8] = unary(%x) op={function}
             %s: f32[s0,4] strides [8,1] = view(%c) view=strided
             %w: f32[s0,4] strides [8,1] = assign(%s, %y)
             %v: f32[4] offset 16 = view(%w) view=strided
             %r: f32[4] = copy(%v)
             return %r\n"
        )
    };
    are_told_apart(&rows(1, "abs"), &rows(1, "neg"));
    assert_eq!(differences(&rows(3, "abs"), &rows(3, "neg")), [""; 0], "the third row is always written");

    let columns = |least: u32, function: &str| {
        format!(
            "sym s0 min {least} max 9 hint {least}
             %x: f32[64] = input()
             %y: f32[2,s0] = input()
             %c: f32[64] = unary(%x) op={function}
             %s: f32[2,s0] strides [16,1] = view(%c) view=strided
             %w: f32[2,s0] strides [16,1] = assign(%s, %y)
             %v: f32[1] offset 19 = view(%w) view=strided
             %r: f32[1] = copy(%v)
             return %r\n"
        )
    };
    are_told_apart(&columns(2, "abs"), &columns(2, "neg"));
    assert_eq!(differences(&columns(4, "abs"), &columns(4, "neg")), [""; 0]);

    let copied = |body: &str| {
        format!(
            "sym s0 min 3 max 9 hint 3
             %x: f32[200] = input()
             {body}
             %r: f32[1] = copy(%v)
             return %r\n"
        )
    };
    let element = copied("%v: f32[1] offset 5 = view(%x) view=strided");
    let rows = copied(
        "%i: f32[2,s0] strides [100,1] = view(%x) view=strided
         %c: f32[2,s0] = copy(%i)
         %v: f32[1] offset 5 = view(%c) view=strided",
    );
    are_told_apart(&element, &rows);
    let sixth = rows.replace("min 3 max 9 hint 3", "min 6 max 9 hint 6");
    assert_eq!(differences(&element.replace("min 3 max 9 hint 3", "min 6 max 9 hint 6"), &sixth), [""; 0]);
}

#[test]
fn a_quotient_may_be_negative() {
    let written = |function: &str| {
        format!(
            "sym s0 min 1 max 9 hint 1
             %x: f32[16] = input()
             %y: f32[4+(s0-5)//2] = input()
             %c: f32[16] = unary(%x) op={function}
             %s: f32[4+(s0-5)//2] = view(%c) view=strided
             %w: f32[4+(s0-5)//2] = assign(%s, %y)
             %v: f32[1] offset 3 = view(%w) view=strided
             %r: f32[1] = copy(%v)
             return %r\n"
        )
    };
    are_told_apart(&written("abs"), &written("neg"));

    let before = graph(
        "sym s0 min 0 max 400 hint 0
         group tp size 2
         %x: f32[256-8*((s0-400)//2),8] = input()
         %p: f32[256-8*((s0-400)//2),8] = unary(%x) op=neg
         %s: f32[256-8*((s0-400)//2),8] = start(%p) prim=all_reduce group=tp red=sum token=0
         %r: f32[256-8*((s0-400)//2),8] = wait(%s) tokens=[0]
         return %r",
    );
    let after = always(&before);
    assert_eq!(
        after.decisions.slots[0].bytes,
        (256 + 8 * 200) * 8 * 4,
        "of the largest size, which has the least symbol"
    );

    let text = Graph::from_text("sym s0 min -3 max 9\nreturn").unwrap_err().to_string();
    assert_eq!(
        text,
        "line 1: found s0 from -3 to Some(9), wanted a new symbol whose least value is not negative, and not above its greatest"
    );
}

#[test]
fn a_call_in_place_writes_all_its_results() {
    let head = "group tp size 2
                %x: f32[2,8] = input()
                %c: f32[2,8] = copy(%x)\n";
    let apart = format!(
        "{head}%p: f32[8] = view(%c) view=strided
         %q: f32[8] offset 8 = view(%c) view=strided
         %a: f32[8]; %b: f32[8] offset 8 = sync(%p, %q) prim=all_reduce group=tp red=sum in_place=true
         %v: f32[8] offset 8 = view(%a) view=strided
         %r: f32[8] = copy(%v)
         return %r\n"
    );
    let other = format!(
        "{head}%k: f32[8] offset 8 = view(%x) view=strided
         %q: f32[8] = copy(%k)
         %p: f32[8] = view(%c) view=strided
         %a: f32[8]; %b: f32[8] = sync(%p, %q) prim=all_reduce group=tp red=sum in_place=true
         %v: f32[8] offset 8 = view(%a) view=strided
         %r: f32[8] = copy(%v)
         return %r\n"
    );
    are_told_apart(&other, &apart);
    are_told_apart(&apart, &other);
    let seen = apart.replace("%v: f32[8] offset 8 = view(%a) view=strided", "%v: f32[8] = copy(%b)");
    assert_eq!(differences(&apart, &seen), [""; 0], "the view of the first result shows the second");

    let twice = "group tp size 2
                 %x: f32[8] = input()
                 %c: f32[8] = copy(%x)
                 %a: f32[8]; %b: f32[8] = sync(%c, %c) prim=all_reduce group=tp red=sum in_place=true
                 return %x";
    assert_eq!(
        refused(twice),
        "a: f32[8] and f32[8] may share elements of one storage, and both are written"
    );
    let partly = apart.replace("offset 8", "offset 7");
    assert!(refused(&partly).contains("may share elements of one storage"), "{}", refused(&partly));
    let folded = "group tp size 2
                  %x: f32[6] = input()
                  %c: f32[6] = copy(%x)
                  %p: f32[4,2] strides [1,2] = view(%c) view=strided
                  %a: f32[4,2] strides [1,2] = sync(%p) prim=all_to_all group=tp in_place=true
                  return %x";
    assert_eq!(
        refused(folded),
        "a: elements of f32[4,2] strides [1,2] may lie in one place, and are written"
    );
}

#[test]
fn an_exchange_has_the_shape_that_it_gives() {
    let call = |from: &str, to: &str, how: &str| {
        let text = format!(
            "sym s0 min 2 max 8 hint 2
             group tp size 2
             %x: f32{from} = input()
             %o: f32{to} = sync(%x) group=tp {how}
             return %o"
        );
        verify(&Graph::from_text(&text).unwrap()).first().map(ToString::to_string)
    };
    let (shard, all) = ("prim=shard_dim_all_to_all dims=[0,1]", "prim=all_to_all");
    for (from, to, how) in [
        ("[4,4,2]", "[8,2,2]", shard),
        ("[s0,4,2]", "[2*s0,2,2]", shard),
        ("[4,4,2]", "[2,8,2]", "prim=shard_dim_all_to_all dims=[1,0]"),
        ("[4,8]", "[4,8]", all),
        ("[s0,8]", "[s0,8]", all),
        ("[4,8]", "[6,8]", "prim=all_to_all sends=[1,3] receives=[3,3]"),
        ("[s0,8]", "[2*s0,8]", "prim=all_to_all sends=[1,\"s0-1\"] receives=[\"s0\",\"s0\"]"),
    ] {
        assert_eq!(call(from, to, how), None, "{from} {to} {how}");
    }
    for (from, to, how, why) in [
        ("[4,4,2]", "[4,2,4]", shard, "ShardDimAllToAll over 2 ranks gives f32[4,2,4] of f32[4,4,2]"),
        ("[4,4,2]", "[16,2,1]", shard, "ShardDimAllToAll"),
        ("[4,3]", "[8,1]", shard, "ShardDimAllToAll"),
        ("[0,4]", "[4,2]", shard, "ShardDimAllToAll"),
        ("[4,8]", "[6,8]", all, "AllToAll over 2 ranks gives f32[6,8] of f32[4,8]"),
        ("[3,8]", "[3,8]", all, "3 rows for 2 ranks"),
        ("[]", "[]", all, "rows of f32[], which has none"),
        ("[4,8]", "[4,8]", "prim=all_to_all sends=[1,2] receives=[2,2]", "3 rows for all ranks, of 4"),
        ("[4,8]", "[4,8]", "prim=all_to_all sends=[-1,5] receives=[2,2]", "-1 rows for a rank"),
        (
            "[s0,8]",
            "[4,8]",
            "prim=all_to_all sends=[\"s0\",1] receives=[2,2]",
            "s0+1 rows for all ranks, of s0",
        ),
        (
            "[4,8]",
            "[4,8]",
            "prim=all_to_all sends=[9223372036854775807,9223372036854775807] receives=[2,2]",
            "more rows than can be counted",
        ),
    ] {
        let found = call(from, to, how).unwrap_or_default();
        assert!(found.contains(why), "{from} {to} {how}: {found}");
    }
}

#[test]
fn memory_of_a_symbolic_size_is_large_enough() {
    let beyond = "sym s0 min 1 max 64 hint 2
                  group tp size 2
                  %x: f32[s0] = input()
                  %p: f32[s0] = unary(%x) op=neg
                  %v: f32[s0] offset BEGIN = view(%p) view=strided
                  %w: f32[s0] offset BEGIN = assign(%v, %x)
                  %q: f32[s0] = view(%w) view=strided
                  %s: f32[s0] = start(%q) prim=all_reduce group=tp red=sum token=0
                  %r: f32[s0] = wait(%s) tokens=[0]
                  return %r";
    assert_eq!(
        refused(&beyond.replace("BEGIN", "4096*s0")),
        "v: the view f32[s0] offset 4096*s0 ends at element 4097*s0, of s0 of f32"
    );
    let given =
        "sym s0 min 1 max 9\n%x: f32[s0] = input()\n%v: f32[4] offset s0 = view(%x) view=strided\nreturn %v";
    assert_eq!(refused(given), "v: the view f32[4] offset s0 ends at element s0+4, of s0 of f32");

    // What may be large enough is a program, but not in memory that peers reach.
    let unknown = beyond
        .replace(" offset BEGIN", "")
        .replace("%v: f32[s0]", "%v: f32[4]")
        .replace("%w: f32[s0]", "%w: f32[4]");
    let before = graph(
        &unknown
            .replace("assign(%v, %x)", "assign(%v, %f)")
            .replace("%p: f32[s0]", "%f: f32[4] = full() value=1\n%p: f32[s0]"),
    );
    let after = always(&before);
    assert_eq!((after.report.findings.len(), after.decisions.slots.len()), (0, 0));
    assert!(
        after.report.to_string().contains("a view of it is not known to end where it does"),
        "{}",
        after.report
    );
    let mut placed = after.graph.clone();
    let req = serde_json::from_str(r#"{"comm":{"domain":"tp","groups":["tp"],"roles":"in"}}"#).unwrap();
    placed.values.iter_mut().find(|value| value.name == "p").unwrap().class = req;
    let findings = check(&before, &after.decisions, &placed);
    assert!(findings[0].text.contains("the view f32[4] ends at element 4, of s0 of f32"), "{findings:?}");
}

#[test]
fn elements_of_other_sizes_are_not_all_of_the_memory() {
    let written = |function: &str| {
        format!(
            "%x: f32[4] = input()
             %y: i8[4] = input()
             %c: f32[4] = unary(%x) op={function}
             %b: i8[16] = opaque(%c) target=bitcast aliases=[{{\"arg\":0,\"writes\":false}}]
             %s: i8[4] = view(%b) view=strided
             %w: i8[4] = assign(%s, %y)
             %d: f32[4] = opaque(%w) target=bitcast aliases=[{{\"arg\":0,\"writes\":false}}]
             %r: f32[4] = copy(%d)
             return %r\n"
        )
    };
    let found = differences(&written("abs"), &written("neg"));
    assert!(found.iter().any(|text| text.contains("another meaning")), "{found:?}");
    // A write of all sixteen codes leaves nothing of what was there.
    let all = |function: &str| written(function).replace("i8[4]", "i8[16]");
    let shown = |function: &str| {
        all(function)
            .replace("%d: f32[4] = opaque(%w) target=bitcast aliases=[{\"arg\":0,\"writes\":false}]\n", "")
            .replace("%r: f32[4] = copy(%d)", "%z: i8[16] = view(%w) view=strided\n%r: i8[16] = copy(%z)")
    };
    assert_eq!(differences(&shown("abs"), &shown("neg")), [""; 0]);
    let first = |view: &str| shown("abs").replace("%z: i8[16]", view).replace("%r: i8[16]", "%r: i8[4]");
    let [one, other] = [first("%z: i8[4]"), first("%z: i8[4] offset 4")];
    are_told_apart(&one, &other);
    let beyond = written("abs").replace("%b: i8[16]", "%b: i8[17]");
    assert_eq!(refused(&beyond), "b: the view i8[17] ends at element 17, of 4 of f32");
}

#[test]
fn strides_and_offsets_are_not_negative() {
    let view = |least: i64, strides: &str| {
        format!(
            "sym s0 min {least} max 9 hint 9\n%x: f32[64] = input()\n%v: f32[4] {strides} = view(%x) view=strided\nreturn %v"
        )
    };
    assert_eq!(
        refused(&view(1, "strides [s0-5] offset 8")),
        "v: f32[4] strides [s0-5] offset 8 has the stride or offset s0-5, which may be negative"
    );
    assert!(refused(&view(1, "offset s0-2")).contains("the stride or offset s0-2, which may be negative"));
    graph(&view(5, "strides [s0-5] offset 8"));
    graph("sym s0 min 0 max 9\n%x: f32[4,s0-1] strides [s0-1,1] = input()\nreturn %x");
}

#[test]
fn a_slot_lies_in_the_heap_of_its_calls() {
    let program = |p: &str, q: &str| {
        format!(
            "group tp size 2
             group dp size 2
             %x: f32[16,8] = input()
             %p: f32[16,8]{p} = unary(%x) op=neg
             %q: f32[16,8]{q} = unary(%x) op=abs
             %s0: f32[16,8] = sync(%p) prim=all_reduce group=tp red=sum
             %s1: f32[16,8] = sync(%q) prim=all_reduce group=tp red=max
             return %s0, %s1\n"
        )
    };
    let class = |domain: &str, roles: &str| {
        format!(
            " class {{\"comm\":{{\"domain\":\"{domain}\",\"groups\":[\"{domain}\"],\"roles\":\"{roles}\"}}}}"
        )
    };
    let before = graph(&program("", ""));
    let placed = always(&before);
    assert_eq!((placed.decisions.slots.len(), placed.report.findings.len()), (2, 0));
    let found = |p: &str, q: &str, domains: [&str; 2]| {
        let mut decisions = placed.decisions.clone();
        decisions.slots.iter_mut().zip(domains).for_each(|(slot, domain)| slot.domain = domain.to_owned());
        let after = graph(&program(p, q));
        check(&before, &decisions, &after).into_iter().map(|finding| finding.text).collect::<Vec<_>>()
    };
    let tp = class("tp", "in");
    assert_eq!(found(&tp, &tp, ["tp", "tp"]), [""; 0]);
    assert_eq!(found(&tp, &class("tp", "in_out"), ["tp", "tp"]), [""; 0]);
    for (q, domain, why) in [
        (class("nobody", "in"), "nobody", "the group nobody does not share the heap of nobody"),
        (class("dp", "in"), "dp", "s1 of tp reads it: true, writes it: false; it asks for In of [\"dp\"]"),
        (class("tp", "out"), "tp", "s1 of tp reads it: true, writes it: false; it asks for Out of [\"tp\"]"),
    ] {
        assert!(
            found(&tp, &q, ["tp", domain]).iter().any(|text| text == why),
            "{:?}",
            found(&tp, &q, ["tp", domain])
        );
    }
    // A call in place reads and writes.
    let in_place = program("", "").replace("red=sum", "red=sum in_place=true").replace("%s0, %s1", "%s1");
    let placed = always(&graph(&in_place));
    assert_eq!((placed.decisions.slots.len(), placed.report.findings.len()), (2, 0), "{}", placed.report);
    assert!(placed.graph.to_text().contains("in_out"), "{}", placed.graph.to_text());
}
