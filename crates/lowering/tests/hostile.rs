//! Files of strangers: each is read, or refused with its place, soon and without a panic.

mod common;

use antiphon_lowering::{Costs, Device, Graph, Options, World, check, fuzz, interpret, lower, verify};
use common::Chance;

const TEXT: &str = "sym s0 min 1 max 9 hint 3
group tp size 2
%x: bf16[s0,64] = input()
%p: bf16[s0,64] = view(%x) view=reshape
%s: bf16[s0,64] = start(%p) prim=all_reduce group=tp red=sum token=0
%w: bf16[s0,64] = wait(%s) tokens=[0]
%a; %b = never
return %w
";

/// Whatever is read is also verified, lowered and interpreted.
fn survive(graph: Graph) {
    verify(&graph);
    lower(&graph, &World::default(), &Costs::of(Device::Host), &Options::default());
    let _ = interpret(&graph, &[Vec::new(), Vec::new()], antiphon_lowering::Arithmetic::Kernels);
}

fn torch() -> String {
    std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/lowering/block.torch.json"))
        .unwrap()
}

#[test]
fn changed_bytes_do_no_harm() {
    let text = TEXT.replace("%a; %b = never\n", "");
    let json = Graph::from_text(&text).unwrap().to_json();
    let torch = torch();
    let (before, after) = fuzz::planned();
    assert_eq!(check(&before, &after.plan, &after.graph), []);
    assert!(!after.plan.slots.is_empty(), "{}", after.plan.to_json());
    let plan = after.plan.to_json();
    let mut chance = Chance(5);
    for round in 0..4_000 {
        let source = [&text, &json, &torch, &plan][round % 4];
        let mut bytes = source.clone().into_bytes();
        for _ in 0..1 + chance.below(3) {
            if bytes.is_empty() {
                break;
            }
            let at = chance.below(bytes.len());
            match chance.below(4) {
                0 => bytes[at] = b"0123456789[](){}%\",:=*s-"[chance.below(24)],
                1 => drop(bytes.remove(at)),
                2 => bytes.truncate(at.max(1)),
                _ => {
                    let end = (at + chance.below(20)).min(bytes.len());
                    let piece = bytes[at..end].to_vec();
                    let place = chance.below(bytes.len());
                    bytes.splice(place..place, piece);
                }
            }
        }
        match round % 4 {
            3 => fuzz::plan_file(&bytes),
            _ => fuzz::graph_file(&bytes),
        }
        let Ok(text) = String::from_utf8(bytes) else { continue };
        let graph = match round % 4 {
            0 => Graph::from_text(&text),
            1 => Graph::from_json(text.as_bytes()),
            _ => Graph::from_torch(text.as_bytes()),
        };
        if let Ok(graph) = graph {
            survive(graph);
        }
    }
}

#[test]
fn what_is_refused_says_where() {
    let text = |text: &str| Graph::from_text(text).unwrap_err().to_string();
    assert_eq!(text(TEXT), "line 7: found ; %b = never, wanted `:`");
    assert_eq!(text("return %x"), "line 1: found x, wanted the name of a value that is defined before");
    assert_eq!(text(""), "the end: found no more lines, wanted `return`");
    assert!(text("%x: f32[4] = input() wrong=1\nreturn").contains("the attribute wrong"));
    assert!(text("%x: f32[4] = nothing()\nreturn").contains("unknown variant `nothing`"));
    assert!(text("%x: f33[4] = input()\nreturn").contains("no element type"));
    assert!(text("group tp size 0\nreturn").contains("1 to 1048576 ranks"));
    let json = |text: &str| Graph::from_json(text.as_bytes()).unwrap_err().to_string();
    assert!(
        json(r#"{"ops": [{"do": {"kind": "input"}, "args": ["x"]}], "outputs": []}"#)
            .starts_with("ops[0].args[0]: found x")
    );
    assert!(json("[").contains("line 1 column 1"));
}

#[test]
fn the_line_of_an_operation_is_told() {
    let text = format!(
        "// a comment\n\n{}",
        TEXT.replace("%a; %b = never\n", "_ = opaque(%w) target=told effect=true\n")
    );
    let graph = Graph::from_text(&text).unwrap();
    for (index, op) in graph.ops.iter().enumerate() {
        let line = text.lines().nth(Graph::line_of(&text, index).unwrap() - 1).unwrap();
        assert!(
            line.starts_with(&format!("%{}: ", op.name)) || line.starts_with("_ = opaque"),
            "{}: {line}",
            op.name
        );
    }
    assert_eq!(Graph::line_of(&text, graph.ops.len()), None);
}

#[test]
fn much_is_bounded() {
    let deep = format!("%x: f32[{}1{}] = input()\nreturn", "(".repeat(100_000), ")".repeat(100_000));
    assert!(Graph::from_text(&deep).is_err());
    let large = "group tp size 2\n%x: f32[1000000,1000000] = input()\n%y: f32[1000000,1000000] = unary(%x) op=neg\nreturn %y";
    let graph = Graph::from_text(large).unwrap();
    let refused =
        interpret(&graph, &[Vec::new(), Vec::new()], antiphon_lowering::Arithmetic::Exact).unwrap_err();
    assert!(refused.contains("more than 67108864 elements"), "{refused}");
}

#[test]
fn a_program_of_torch_is_fused() {
    let graph = Graph::from_torch(torch().as_bytes()).unwrap();
    assert_eq!(verify(&graph), []);
    let lowered = lower(&graph, &World::default(), &Costs::of(Device::H200), &Options::default());
    assert_eq!(lowered.report.calls, [1, 1]);
    assert!(lowered.report.to_string().contains("one call gives residual, norm"), "{}", lowered.report);
}
