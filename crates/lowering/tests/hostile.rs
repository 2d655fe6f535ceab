//! Files of strangers: each is read, or refused with its place, soon and without a panic.

mod common;

use antiphon_lowering::{
    Costs, Device, Graph, Numerics, Options, Realize, World, check, compare, fuzz, interpret, lower, verify,
};
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
    let always = Options { realize: Realize::Always, overlap: true, ..Options::default() };
    for options in [Options::default(), always] {
        let lowered = lower(&graph, &World::default(), &Costs::of(Device::Host), &options);
        // What is written is read again.
        assert_eq!(
            Graph::from_json(lowered.graph.to_json().as_bytes()).unwrap().to_json(),
            lowered.graph.to_json()
        );
        assert_eq!(Graph::from_text(&lowered.graph.to_text()).unwrap().to_json(), lowered.graph.to_json());
    }
    let _ = compare(&graph, &graph, Numerics::Same, 2);
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
    assert_eq!(check(&before, &after.decisions, &after.graph), []);
    assert!(!after.decisions.slots.is_empty(), "{}", after.decisions.to_json());
    let decisions = after.decisions.to_json();
    let mut chance = Chance(5);
    for round in 0..4_000 {
        let source = [&text, &json, &torch, &decisions][round % 4];
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
            3 => fuzz::decisions_file(&bytes),
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
    let odd = |attribute: &str| {
        text(&format!("%x: f32[4] = input()\n%y: f32[4] = unary(%x) op=neg {attribute}\nreturn %y"))
    };
    for attribute in ["keepdimm=false", "in_plce=null", "colour=\"\"", "list=[]", "dims=[]", "kind=unary"] {
        let key = attribute.split_once('=').unwrap().0;
        let found = odd(attribute);
        let told = format!("line 2: found the attribute {key}, wanted one of kind, op");
        assert!(found == told || found.contains("each attribute once"), "{found}");
    }
    assert!(odd("name=a name=b").contains("wanted each attribute once"), "{}", odd("name=a name=b"));
    assert!(
        text("%x: f32[4] class {\"comm\":{\"domain\":\"a\",\"domain\":\"b\"}} = input()\nreturn")
            .contains("domain twice")
    );
    Graph::from_text("%x: f32[4] = input()\n%y: f32[] = reduce(%x) op=sum dims=[0] keepdim=false\nreturn %y")
        .unwrap();
    assert!(text("group tp size 0\nreturn").contains("1 to 1048576 ranks"));
    let json = |text: &str| Graph::from_json(text.as_bytes()).unwrap_err().to_string();
    assert!(
        json(r#"{"ops": [{"do": {"kind": "input"}, "args": ["x"]}], "outputs": []}"#)
            .starts_with("ops[0].args[0]: found x")
    );
    assert!(json("[").contains("line 1 column 1"));
    let unary = |attributes: &str| {
        json(&format!(
            r#"{{"ops":[{{"do":{{"kind":"input"}},"outs":[{{"name":"x","dtype":"f32","shape":[4]}}]}},
                {{"do":{{"kind":"unary",{attributes}}},"args":["x"],"outs":[{{"name":"y","dtype":"f32","shape":[4]}}]}}],"outputs":["y"]}}"#
        ))
    };
    assert!(
        unary(r#""op":"neg","op":"abs""#).starts_with("ops[1].do: found op twice"),
        "{}",
        unary(r#""op":"neg","op":"abs""#)
    );
    assert!(unary(r#""op":"neg","colour":null"#).contains("found the attribute colour"));
    let domain = json(
        r#"{"groups":[{"name":"tp","size":2,"domain":"a b\n%z: f32[4] = input()"}],"ops":[],"outputs":[]}"#,
    );
    assert!(domain.starts_with("groups[0]: found") && domain.contains("wanted a name"), "{domain}");
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

/// Programs whose numbers are as large as numbers can be, or whose tensors have no elements.
#[test]
fn numbers_do_not_overflow() {
    let sums = |size: &str, begin: &str| {
        format!(
            "sym s0 min 1 max 9 hint 1
             group tp size 2
             %x: f32[{size}] = input()
             %p: f32[{size}]{begin} = unary(%x) op=neg
             %s: f32[{size}] = start(%p) prim=all_reduce group=tp red=sum token=4294967294
             %r: f32[{size}] = wait(%s) tokens=[4294967294]
             return %r"
        )
    };
    let two = |token: u32| {
        format!(
            "group tp size 2
             %x: f32[4,8] = input()
             %y: f32[4,8] = input()
             %s: f32[4,8] = start(%x) prim=all_reduce group=tp red=sum token={token}
             %a: f32[4,8] = wait(%s) tokens=[{token}]
             %t: f32[4,8] = start(%y) prim=all_reduce group=tp red=sum token=0
             %b: f32[4,8] = wait(%t) tokens=[0]
             %r: f32[4,8] = binary(%a, %b) op=add
             return %r"
        )
    };
    let call = |from: &str, to: &str, how: &str| {
        format!("group tp size 2\n%x: f32{from} = input()\n%o: f32{to} = sync(%x) group=tp {how}\nreturn %o")
    };
    let shard = "prim=shard_dim_all_to_all dims=[0,1]";
    for text in [
        sums("4", " offset 4611686018427387904"),
        sums("9223372036854775807", ""),
        sums("4611686018427387903,2", ""),
        two(u32::MAX),
        two(u32::MAX - 1),
        call("[4,4,2]", "[16,2,1]", shard),
        call("[0,4]", "[0,2]", shard),
        call("[0,4]", "[4,2]", shard),
        call("[]", "[]", "prim=all_to_all"),
        call("[0,3]", "[0,3]", "prim=all_to_all"),
        call(
            "[4,8]",
            "[4,8]",
            "prim=all_to_all sends=[9223372036854775807,9223372036854775807] receives=[2,2]",
        ),
        call("[4611686018427387904]", "[4835703278458516698]", "prim=all_gather"),
    ] {
        survive(Graph::from_text(&text).unwrap());
    }
    let merged = graph_of(&two(u32::MAX));
    let lowered = lower(&merged, &World::default(), &Costs::of(Device::Host), &Options::default());
    assert_eq!((lowered.report.calls, lowered.report.findings.len()), ([2, 1], 0), "{}", lowered.report);
    let least = "s0%(-9223372036854775807-1)";
    let refused = Graph::from_text(&sums(least, "")).unwrap_err().to_string();
    assert_eq!(
        refused, "line 3: found 9223372036854775808 is no 64-bit integer, wanted a size",
        "as it is written"
    );
    survive(graph_of(&sums("s0%(-9223372036854775807)", "")));
}

fn graph_of(text: &str) -> Graph {
    Graph::from_text(text).unwrap()
}

#[test]
fn long_names_stay_names() {
    let name = "s".repeat(256);
    let text = format!(
        "group tp:0 size 2 domain tp:1
         %x: f32[4,8] = input()
         %{name}: f32[4,8] = start(%x) prim=all_reduce group=\"tp:0\" red=sum token=0
         %r: f32[4,8] = wait(%{name}) tokens=[0]
         return %r"
    );
    survive(graph_of(&text));
    let mut names = graph_of(&text).names();
    let fresh: Vec<String> = (0..20).map(|_| names.fresh(&format!("{name}_sync"))).collect();
    assert!(fresh.iter().all(|name| name.len() <= 256), "{fresh:?}");
    assert_eq!(fresh.iter().collect::<std::collections::BTreeSet<_>>().len(), 20);
}

#[test]
fn a_program_of_torch_is_fused() {
    let graph = Graph::from_torch(torch().as_bytes()).unwrap();
    assert_eq!(verify(&graph), []);
    let lowered = lower(&graph, &World::default(), &Costs::of(Device::H200), &Options::default());
    assert_eq!(lowered.report.calls, [1, 1]);
    assert!(lowered.report.to_string().contains("one call gives residual, norm"), "{}", lowered.report);
}
