//! The other rules, each where it applies and where it must not.

mod common;

use antiphon_lowering::{
    Arithmetic, Class, Costs, Device, Graph, Kind, Numerics, Options, Realize, World, check, lower,
    rules::{
        realize::{CanRealize, can_realize, realize},
        sync::elide,
    },
};
use common::{agree, graph, kinds, lowered, numerics};

const HEAD: &str = "
group tp size 2
group alone size 1
%x: f32[4,8] = input()
%y: f32[4,8] = input()
";

fn program(body: &str) -> Graph {
    graph(&format!("{HEAD}{body}"))
}

/// The sum of a value over a group, which is waited for at once.
fn sum(name: &str, of: &str, group: &str, token: u32) -> String {
    format!(
        "%{name}_start: f32[4,8] = start({of}) prim=all_reduce group={group} red=sum token={token}
         %{name}: f32[4,8] = wait(%{name}_start) tokens=[{token}]\n"
    )
}

fn same_numbers(before: &Graph, after: &Graph) {
    agree(before, after, 2, 7, Arithmetic::Exact, 1e-12);
}

#[test]
fn the_same_sum_is_made_once() {
    let uses = "%d: f32[4,8] = binary(%a, %b) op=mul\nreturn %d";
    let before = program(&(sum("a", "%x", "tp", 0) + &sum("b", "%x", "tp", 1) + uses));
    let after = lowered(&before, &numerics(Numerics::Same));
    assert_eq!(after.report.calls, [2, 1], "{}", after.report);
    same_numbers(&before, &after.graph);

    // Its memory is returned: two outputs would become one.
    let before = program(&(sum("a", "%x", "tp", 0) + &sum("b", "%x", "tp", 1) + "return %a, %b"));
    let after = lowered(&before, &Options::default());
    assert_eq!(after.report.calls, [2, 2]);
    assert!(after.report.to_string().contains("its memory is returned"), "{}", after.report);
}

/// A copy of a turned tensor has its elements, and a reshape has its memory: strided views of both show different elements.
#[test]
fn strided_views_show_the_storage() {
    let before = graph(
        "group tp size 2
         %x: f32[4,4] = input()
         %c: f32[4,4] = unary(%x) op=neg
         %t: f32[4,4] strides [1,4] = view(%c) view={\"permute\":[1,0]}
         %k: f32[4,4] = copy(%t)
         %u: f32[4,4] strides [1,4] = view(%t) view=reshape
         %a: f32[4,4] = view(%k) view=strided
         %b: f32[4,4] = view(%u) view=strided
         %s0: f32[4,4] = start(%a) prim=all_reduce group=tp red=max token=0
         %w0: f32[4,4] = wait(%s0) tokens=[0]
         %s1: f32[4,4] = start(%b) prim=all_reduce group=tp red=max token=1
         %w1: f32[4,4] = wait(%s1) tokens=[1]
         %d: f32[4,4] = binary(%w0, %w1) op=sub
         return %d",
    );
    let after = lowered(&before, &Options::default());
    assert_eq!(after.report.calls, [2, 2], "{}", after.report);
    same_numbers(&before, &after.graph);
    // Views of one storage are one, whatever view they are of.
    let text = before.to_text().replace("= copy(%t)", "= view(%c) view=reshape");
    assert_eq!(lowered(&graph(&text), &Options::default()).report.calls, [2, 1]);
}

#[test]
fn a_sum_over_one_rank_is_a_copy() {
    let before = program(&(sum("a", "%x", "alone", 0) + "return %a"));
    let after = lowered(&before, &numerics(Numerics::Same));
    assert_eq!(kinds(&after.graph), ["copy"]);
    same_numbers(&before, &after.graph);
}

#[test]
fn sums_of_sums_are_one() {
    let three = sum("a", "%x", "tp", 0)
        + &sum("b", "%y", "tp", 1)
        + "%p: f32[4,8] = binary(%a, %b) op=add\n%z: f32[4,8] = binary(%x, %y) op=mul\n"
        + &sum("c", "%z", "tp", 2);
    let before = program(&(three.clone() + "%q: f32[4,8] = binary(%p, %c) op=add\nreturn %q"));
    let after = lowered(&before, &Options { fuse: false, ..Options::default() });
    assert_eq!(after.report.calls, [3, 1], "{}", after.report);
    assert_eq!(after.decisions.calls[0].covers, ["a_start", "b_start", "c_start"]);
    same_numbers(&before, &after.graph);

    let after = lowered(&before, &Options { fuse: false, ..numerics(Numerics::Same) });
    assert_eq!(after.report.calls, [3, 3]);
    assert!(after.report.to_string().contains("would be rounded otherwise"), "{}", after.report);

    // A sum that is used elsewhere stays.
    let before = program(&(three + "%q: f32[4,8] = binary(%p, %c) op=add\nreturn %q, %a, %c"));
    let after = lowered(&before, &Options { fuse: false, ..Options::default() });
    assert_eq!(after.report.calls, [3, 3]);
}

#[test]
fn sums_that_cancel_each_other_out_merge() {
    let parts =
        "%p: f32[4,8] = binary(%x) op=sub scalar=1\n%q: f32[4,8] = binary(%x) op=sub scalar=1 swapped=true\n";
    let uses = "%d: f32[4,8] = binary(%a, %b) op=add\nreturn %d";
    let before = program(&(parts.to_owned() + &sum("a", "%p", "tp", 0) + &sum("b", "%q", "tp", 1) + uses));
    let after = lowered(&before, &Options::default());
    assert_eq!(after.report.calls, [2, 1], "{}", after.report);
    same_numbers(&before, &after.graph);
}

#[test]
fn integers_wrap_so_that_their_sums_merge_exactly() {
    let text = format!(
        "{HEAD}{}{}%p: f32[4,8] = binary(%a, %b) op=add\nreturn %p",
        sum("a", "%x", "tp", 0),
        sum("b", "%y", "tp", 1)
    );
    let before = graph(&text.replace("f32", "i32"));
    let after = lowered(&before, &numerics(Numerics::Same));
    assert_eq!(after.report.calls, [2, 1], "{}", after.report);
    agree(&before, &after.graph, 2, 8, Arithmetic::Kernels, 0.0);
}

/// Four gradients of one size, each ready before the last is summed.
#[test]
fn neighbouring_calls_become_a_bucket() {
    let bodies: String = (0..4)
        .map(|i| {
            format!(
                "%g{i}: f32[4,8] = binary(%x) op=mul scalar={i}.5
                 %s{i}: f32[4,8] = start(%g{i}) prim=all_reduce group=tp red=sum token={i}\n"
            )
        })
        .collect();
    let waits: String = (0..4).map(|i| format!("%w{i}: f32[4,8] = wait(%s{i}) tokens=[{i}]\n")).collect();
    let before = program(&format!("{bodies}{waits}return %w0, %w1, %w2, %w3"));
    let overlap = Options { overlap: true, ..Options::default() };
    let after = lowered(&before, &overlap);
    assert_eq!(after.report.calls, [4, 1], "{}", after.report);
    assert!(after.report.to_string().contains("bucket: 4 calls of 512 bytes are one"), "{}", after.report);
    agree(&before, &after.graph, 2, 3, Arithmetic::Kernels, 0.0);
    // One that needs another's result cannot travel with it, and a call between keeps them apart.
    for (what, with) in [
        ("%g3: f32[4,8] = binary(%x)", "%g3: f32[4,8] = binary(%early)"),
        ("red=sum token=2", "red=max token=2"),
    ] {
        let early = "%s0: f32[4,8] = start(%g0) prim=all_reduce group=tp red=sum token=0\n";
        let wait = "%w0: f32[4,8] = wait(%s0) tokens=[0]\n";
        let text = format!("{bodies}{waits}return %w0, %w1, %w2, %w3").replace(what, with);
        let text = match with.contains("early") {
            true => text.replace(wait, "").replace(early, &format!("{early}{wait}")).replace("%early", "%w0"),
            false => text,
        };
        let before = program(&text);
        let after = lowered(&before, &overlap);
        assert!(after.report.calls[1] >= 2, "{}", after.report);
        agree(&before, &after.graph, 2, 3, Arithmetic::Kernels, 0.0);
    }
}

/// D1 and D7: a synchronous call has no wait, and takes no other's away.
#[test]
fn waits_go_by_token() {
    let before = program(
        "%one: f32[4,8] = binary(%x) op=add scalar=1.0
         %a_start: f32[4,8] = start(%one) prim=all_reduce group=tp red=sum in_place=true token=0
         %a: f32[4,8] = wait(%a_start) tokens=[0]
         %b_start: f32[4,8] = start(%a) prim=all_reduce group=tp red=avg in_place=true token=1
         %m: f32[4,8] = binary(%x) op=mul scalar=3.0
         %b: f32[4,8] = wait(%b_start) tokens=[1]
         %c: f32[4,8] = binary(%b, %m) op=mul
         return %c",
    );
    let after = lowered(&before, &Options::default());
    let starts = after.graph.ops.iter().filter(|op| matches!(op.kind, Kind::Start { .. })).count();
    let waits = after.graph.ops.iter().filter(|op| matches!(op.kind, Kind::Wait { .. })).count();
    assert_eq!((starts, waits), (0, 0), "{}", after.report);
    agree(&before, &after.graph, 2, 9, Arithmetic::Kernels, 0.0);
}

#[test]
fn one_wait_is_elided_by_its_token() {
    let before = program(&(sum("a", "%x", "tp", 0) + &sum("b", "%a", "tp", 1) + "return %b"));
    let start = before.ops.iter().position(|op| op.name == "a_start").unwrap();
    let after = elide(&before, start.into()).unwrap();
    assert_eq!(kinds(&after), ["sync", "start", "wait"]);
    same_numbers(&before, &after);
    assert_eq!(elide(&before, 0.into()).unwrap_err(), "x is no start of one tensor with a wait of its own");
    let b = after.outputs[0];
    assert_eq!(after.name(after.root(b).unwrap()), "b_start");
}

#[test]
fn a_call_with_much_to_hide_behind_stays_beside_it() {
    let text = "
        group tp size 2
        %x: f32[512,512] = input()
        %w: f32[512,512] = input()
        %a_start: f32[512,512] = start(%x) prim=all_reduce group=tp red=sum token=0
        %m: f32[512,512] = matmul(%w, %w)
        %a: f32[512,512] = wait(%a_start) tokens=[0]
        %c: f32[512,512] = binary(%a, %m) op=mul
        return %c";
    let after = lowered(&graph(text), &Options::default());
    assert!(kinds(&after.graph).contains(&"start".to_owned()), "{}", after.graph.to_text());
    assert!(after.report.to_string().contains("of computation run beside it"), "{}", after.report);
}

#[test]
fn starts_come_early_and_waits_late() {
    let text = "
        group tp size 2
        %x: f32[512,512] = input()
        %w: f32[512,512] = input()
        %m: f32[512,512] = matmul(%w, %w)
        %a_start: f32[512,512] = start(%x) prim=all_reduce group=tp red=sum token=0
        %a: f32[512,512] = wait(%a_start) tokens=[0]
        %n: f32[512,512] = matmul(%m, %w)
        %c: f32[512,512] = binary(%a, %n) op=mul
        return %c";
    let before = graph(text);
    let options = Options { overlap: true, fuse: false, ..Options::default() };
    let after = lowered(&before, &options);
    assert_eq!(kinds(&after.graph), ["start", "matmul", "matmul", "wait", "binary"], "{}", after.report);
    assert!(after.report.nanoseconds[1] < after.report.nanoseconds[0]);
}

/// D3: what is reduced and returned is no communication buffer.
#[test]
fn what_is_returned_does_not_lie_where_peers_write() {
    let always = Options { realize: Realize::Always, ..Options::default() };
    let body = "%one: f32[4,8] = binary(%x) op=add scalar=1.0\n".to_owned() + &sum("a", "%one", "tp", 0);
    let after = lowered(&program(&(body.clone() + "return %a, %one")), &always);
    assert_eq!(after.decisions.slots, []);
    assert!(after.report.to_string().contains("it is returned"), "{}", after.report);

    let after = lowered(&program(&(body.clone() + "return %a")), &always);
    assert_eq!(
        (after.decisions.slots.len(), after.decisions.slots[0].bytes, after.report.comm_bytes),
        (1, 256, 256)
    );
    // Symmetric memory was measured to gain nothing, at any size.
    for (device, rows) in [(Device::Host, "4"), (Device::Host, "4096"), (Device::H200, "4096")] {
        let world = World { device, ..World::default() };
        let before =
            graph(&program(&(body.clone() + "return %a")).to_text().replace("[4,8]", &format!("[{rows},8]")));
        let lowered = lower(&before, &world, &Costs::of(device), &Options::default());
        assert_eq!(lowered.decisions.slots, [], "{device}, {rows} rows");
        assert!(
            lowered.report.rewrites.iter().any(|rewrite| rewrite.rule == "sync"),
            "{device}, {rows} rows"
        );
    }
}

/// D5: a size that is not known has a slot of its bound, or none.
#[test]
fn a_size_that_is_not_known_is_bounded_or_refused() {
    let text = |range: &str, limit: u64| {
        let text = format!(
            "sym s0 min 1 {range} hint 4\n{HEAD}%z: f32[s0,8] = input()
             %one: f32[s0,8] = binary(%z) op=add scalar=1.0
             {}return %a",
            sum("a", "%one", "tp", 0).replace("[4,8]", "[s0,8]")
        );
        let options = Options { realize: Realize::Always, max_slot_bytes: limit, ..Options::default() };
        lowered(&graph(&text), &options)
    };
    assert_eq!(
        text("max 100", 1 << 20).decisions.slots[0].bytes,
        3328,
        "100 rows of 32 bytes, in units of 256"
    );
    assert!(text("max 100", 1 << 10).report.to_string().contains("3200 bytes: at most 1024"));
    assert!(text("", 1 << 20).report.to_string().contains("has no bound"));
}

/// D8: storages of several groups share bytes, one after the other.
#[test]
fn groups_of_one_heap_share_a_slot() {
    let mut text = HEAD
        .replace("size 2", "size 2 domain node")
        .replace("group alone size 1", "group dp size 2 domain node");
    let mut last = "%x".to_owned();
    for (index, group) in ["tp", "dp", "tp"].into_iter().enumerate() {
        text += &format!("%p{index}: f32[4,8] = binary({last}) op=mul scalar=1.5\n");
        text += &sum(&format!("a{index}"), &format!("%p{index}"), group, index as u32);
        last = format!("%a{index}");
    }
    let options = Options { realize: Realize::Always, fuse: false, ..Options::default() };
    let after = lowered(&graph(&format!("{text}return {last}")), &options);
    assert_eq!(
        (after.decisions.slots.len(), after.report.comm_bytes),
        (3, 256),
        "{:?}",
        after.decisions.slots
    );
}

#[test]
fn realisation_says_what_is_possible() {
    let mut graph = program(
        &("%one: f32[4,8] = binary(%x) op=add scalar=1.0\n".to_owned()
            + &sum("a", "%one", "tp", 0)
            + "return %a"),
    );
    let find = |graph: &Graph, name: &str| {
        graph.ops.iter().flat_map(|op| &op.outs).copied().find(|id| graph.name(*id) == name).unwrap()
    };
    let (x, one) = (find(&graph, "x"), find(&graph, "one"));
    let analysis = graph.analyse();
    assert_eq!(can_realize(&graph, &analysis, one, "tp"), CanRealize::Yes);
    assert_eq!(can_realize(&graph, &analysis, x, "tp"), CanRealize::No("x: it is the caller's".into()));
    assert_eq!(realize(&mut graph, one, "nobody").unwrap_err(), "there is no group nobody");
    realize(&mut graph, one, "tp").unwrap();
    assert!(matches!(&graph.value(one).class, Class::Comm(req) if req.groups == ["tp"]));
    assert_eq!(Graph::from_text(&graph.to_text()).unwrap(), graph);
}

#[test]
fn groups_that_are_not_ours_are_left_alone() {
    let before = program(&(sum("a", "%x", "alone", 0) + &sum("b", "%y", "tp", 1) + "return %a, %b"));
    let world = World { groups: Some(vec!["other".into()]), ..World::default() };
    let after = lower(&before, &world, &Costs::of(Device::Host), &Options::default());
    assert_eq!(after.graph, before);
    assert_eq!(check(&before, &after.decisions, &after.graph), []);
}

#[test]
fn equal_input_gives_equal_bytes() {
    let before = program(
        &(sum("a", "%x", "tp", 0)
            + &sum("b", "%y", "tp", 1)
            + "%p: f32[4,8] = binary(%a, %b) op=add\nreturn %p"),
    );
    let texts = || {
        let after = lowered(&before, &Options::default());
        (after.graph.to_json(), after.decisions.to_json(), after.report.to_string())
    };
    assert_eq!(texts(), texts());
    let again = Graph::from_json(before.to_json().as_bytes()).unwrap();
    assert_eq!(lowered(&again, &Options::default()).graph.to_json(), texts().0);
}

/// What ranks compare: everything that they must agree on, and nothing else.
#[test]
fn the_digest_of_a_groups_calls_tells_ranks_apart_whose_calls_differ() {
    let text = "group tp size 2
        group dp size 2
        %x: f32[4,8] = input()
        %r: f32[4,8] = input()
        %s: f32[4,8] = start(%x) prim=all_reduce group=tp red=sum token=0
        %a: f32[4,8] = wait(%s) tokens=[0]
        %b: f32[4,8] = binary(%a, %r) op=add
        %c: f32[4,8] = binary(%b, %b) op=mul
        %d: f32[4,1] = reduce(%c) op=mean dims=[1] keepdim=true
        %e: f32[4,1] = binary(%d) op=add scalar=0.01
        %f: f32[4,1] = unary(%e) op=rsqrt
        %n: f32[4,8] = binary(%b, %f) op=mul
        %t: f32[4,8] = start(%x) prim=broadcast group=dp root=0 token=1
        %u: f32[4,8] = wait(%t) tokens=[1]
        %p: f32[4,8] = start(%x) prim=all_to_all group=dp sends=[1,3] receives=[2,2] token=2
        %q: f32[4,8] = wait(%p) tokens=[2]
        return %n, %u, %q";
    let decisions = |text: &str| lowered(&graph(text), &Options::default()).decisions;
    let of = |text: &str| ["tp", "dp"].map(|group| decisions(text).digest(group));
    let wanted = of(text);
    let fused = decisions(text).calls[0].signature.clone();
    assert!(
        fused.starts_with("fused(f32[4,8], f32[4,8]) args=[") && fused.contains(" eps=0.00999"),
        "{fused}"
    );
    // Each changes one group's calls: of tp, of dp, of both.
    for (old, new, changes) in [
        ("scalar=0.01", "scalar=0.02", [true, false]),
        ("red=sum", "red=max", [true, false]),
        ("root=0", "root=1", [false, true]),
        ("8]", "16]", [true, true]),
        ("f32", "f16", [true, true]),
        // The parts of an uneven exchange are each rank's own, and so is what is computed between calls.
        ("sends=[1,3]", "sends=[2,2]", [false, false]),
        ("op=rsqrt", "op=rsqrt name=root", [false, false]),
    ] {
        let found = of(&text.replace(old, new));
        assert_eq!([found[0] != wanted[0], found[1] != wanted[1]], changes, "{old} → {new}");
    }
    // So is the number of its rows.
    let exchange = text.replace("%x) prim=all_to_all", "%y) prim=all_to_all");
    let rows = |rows: usize| {
        exchange
            .replace(
                "%r: f32[4,8] = input()",
                &format!("%r: f32[4,8] = input()\n%y: f32[{rows},8] = input()"),
            )
            .replace("sends=[1,3]", &format!("sends=[1,{}]", rows - 1))
    };
    assert_eq!(of(&rows(4)), of(&rows(5)));
    assert_eq!(of(&rows(4)), wanted);
}
