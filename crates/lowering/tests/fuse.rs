//! A sum with what follows it becomes one call, however it is spelled.

mod common;

use antiphon_lowering::{
    Arithmetic, Costs, Device, Fused, FusedOutput, Graph, Kind, Numerics, Options, Quantize, World, check,
    lower,
};
use antiphon_tuning::{Key, Table, Timing};
use common::{agree, graph, kinds, lowered, numerics};

/// A block of a tensor-parallel layer: `body` goes from `%sum` to the outputs.
fn block(dtype: &str, body: &str) -> String {
    format!(
        "group tp size 2
         %x: {dtype}[3,64] = input()
         %residual: {dtype}[3,64] = input()
         %partial: {dtype}[3,64] = input()
         %weight: {dtype}[64] = input()
         %start: {dtype}[3,64] = start(%x) prim=all_reduce group=tp red=sum token=0
         %sum: {dtype}[3,64] = wait(%start) tokens=[0]
         {body}"
    )
}

/// `torch.nn.functional.rms_norm`, as torch decomposes it.
const RMS_NORM: &str = "
    %add: bf16[3,64] = binary(%sum, %residual) op=add
    %wide: f32[3,64] = cast(%add)
    %square: f32[3,64] = binary(%wide) op=pow scalar=2.0
    %mean: f32[3,1] = reduce(%square) op=mean dims=[1] keepdim=true
    %eps: f32[3,1] = binary(%mean) op=add scalar=9.999999974752427e-07
    %rsqrt: f32[3,1] = unary(%eps) op=rsqrt
    %scaled: f32[3,64] = binary(%wide, %rsqrt) op=mul
    %weighted: f32[3,64] = binary(%scaled, %weight) op=mul
    %norm: bf16[3,64] = cast(%weighted)
    return %norm, %add";

/// Hugging Face's: rounded, then weighted.
const LLAMA: &str = "
    %add: bf16[3,64] = binary(%residual, %sum) op=add
    %wide: f32[3,64] = cast(%add)
    %square: f32[3,64] = binary(%wide) op=pow scalar=2.0
    %mean: f32[3,1] = reduce(%square) op=mean dims=[1] keepdim=true
    %eps: f32[3,1] = binary(%mean) op=add scalar=1e-6
    %rsqrt: f32[3,1] = unary(%eps) op=rsqrt
    %scaled: f32[3,64] = binary(%wide, %rsqrt) op=mul
    %narrow: bf16[3,64] = cast(%scaled)
    %norm: bf16[3,64] = binary(%weight, %narrow) op=mul
    return %norm, %add";

/// Gemma's: the weight is a difference from 1.
const GEMMA: &str = "
    %add: bf16[3,64] = binary(%sum, %residual) op=add
    %wide: f32[3,64] = cast(%add)
    %square: f32[3,64] = binary(%wide, %wide) op=mul
    %mean: f32[3,1] = reduce(%square) op=mean dims=[1] keepdim=true
    %eps: f32[3,1] = binary(%mean) op=add scalar=1e-6
    %rsqrt: f32[3,1] = unary(%eps) op=rsqrt
    %scaled: f32[3,64] = binary(%wide, %rsqrt) op=mul
    %wider: f32[64] = cast(%weight)
    %one: f32[64] = binary(%wider) op=add scalar=1.0
    %weighted: f32[3,64] = binary(%scaled, %one) op=mul
    %norm: bf16[3,64] = cast(%weighted)
    return %norm, %add";

/// vLLM's: the residual is added in f32.
const VLLM: &str = "
    %a: f32[3,64] = cast(%sum)
    %b: f32[3,64] = cast(%residual)
    %wide: f32[3,64] = binary(%a, %b) op=add
    %square: f32[3,64] = binary(%wide) op=pow scalar=2.0
    %mean: f32[3,1] = reduce(%square) op=mean dims=[1] keepdim=true
    %eps: f32[3,1] = binary(%mean) op=add scalar=1e-6
    %rsqrt: f32[3,1] = unary(%eps) op=rsqrt
    %scaled: f32[3,64] = binary(%wide, %rsqrt) op=mul
    %narrow: bf16[3,64] = cast(%scaled)
    %norm: bf16[3,64] = binary(%narrow, %weight) op=mul
    %add: bf16[3,64] = cast(%wide)
    return %norm, %add";

/// A mean that is a sum over a number, a root under a fraction, through another shape, and no residual.
const BY_HAND: &str = "
    %flat: bf16[1,3,64] = view(%sum) view=reshape
    %wide: f32[1,3,64] = cast(%flat)
    %square: f32[1,3,64] = binary(%wide, %wide) op=mul
    %total: f32[1,3,1] = reduce(%square) op=sum dims=[2] keepdim=true
    %mean: f32[1,3,1] = binary(%total) op=div scalar=64.0
    %eps: f32[1,3,1] = binary(%mean) op=add scalar=1e-6
    %root: f32[1,3,1] = unary(%eps) op=sqrt
    %scaled: f32[1,3,64] = binary(%wide, %root) op=div
    %weighted: f32[1,3,64] = binary(%weight, %scaled) op=mul
    %norm: bf16[1,3,64] = cast(%weighted)
    return %norm, %sum";

const SPELLINGS: [(&str, &str); 5] =
    [("rms_norm", RMS_NORM), ("llama", LLAMA), ("gemma", GEMMA), ("vllm", VLLM), ("by hand", BY_HAND)];

/// The same with the steps of the kernels: the sum times `1 / n`, and a root and its reciprocal.
fn in_steps(body: &str) -> String {
    body.replace(
        "%mean: f32[3,1] = reduce(%square) op=mean dims=[1] keepdim=true",
        "%total: f32[3,1] = reduce(%square) op=sum dims=[1] keepdim=true
         %mean: f32[3,1] = binary(%total) op=mul scalar=0.015625",
    )
    .replace(
        "%rsqrt: f32[3,1] = unary(%eps) op=rsqrt",
        "%root: f32[3,1] = unary(%eps) op=sqrt
         %rsqrt: f32[3,1] = unary(%root) op=reciprocal",
    )
}

fn fused(graph: &Graph) -> &Fused {
    let call = graph.ops.iter().find_map(|op| match &op.kind {
        Kind::Fused { fused } => Some(fused),
        _ => None,
    });
    call.unwrap_or_else(|| panic!("nothing is fused\n{}", graph.to_text()))
}

#[test]
fn every_spelling_of_a_norm_becomes_one_call() {
    for dtype in ["bf16", "f16", "f32"] {
        for (name, body) in SPELLINGS {
            let before = graph(&block(dtype, &body.replace("bf16", dtype)));
            let after = lowered(&before, &Options::default());
            let left = kinds(&after.graph);
            let views = usize::from(name == "by hand");
            assert_eq!(left.len(), 1 + views, "{dtype} {name}: {left:?}\n{}", after.report);
            assert_eq!(fused(&after.graph).weight_bias, if name == "gemma" { 1.0 } else { 0.0 });
            agree(&before, &after.graph, 2, 1, Arithmetic::Exact, 1e-9);
            let rounding = [("bf16", 1e-2), ("f16", 2e-3), ("f32", 1e-6)];
            let tolerance = rounding.into_iter().find(|(name, _)| *name == dtype).unwrap().1;
            agree(&before, &after.graph, 2, 1, Arithmetic::Kernels, 2.0 * tolerance);
        }
    }
}

#[test]
fn under_same_only_what_is_rounded_where_the_kernels_round_is_fused() {
    for (name, body) in SPELLINGS {
        for (is_in_steps, body) in [(false, body.to_owned()), (true, in_steps(body))] {
            let before = graph(&block("bf16", &body));
            let after = lowered(&before, &numerics(Numerics::Same));
            let has_norm = after.graph.ops.iter().any(
                |op| matches!(&op.kind, Kind::Fused { fused } if fused.outputs.contains(&FusedOutput::Norm)),
            );
            // Hugging Face's weight is multiplied after a rounding, as the kernels can; other spellings multiply in another order.
            assert_eq!(has_norm, name == "llama" && is_in_steps, "{name}\n{}", after.report);
            // The sum over a row is in another order, by which one rounding in many falls otherwise.
            agree(&before, &after.graph, 2, 2, Arithmetic::Kernels, 1e-2);
        }
    }
    let unweighted = in_steps(LLAMA)
        .replace("%norm: bf16[3,64] = binary(%weight, %narrow) op=mul", "")
        .replace("return %norm", "return %narrow");
    let after = lowered(&graph(&block("bf16", &unweighted)), &numerics(Numerics::Same));
    assert_eq!(fused(&after.graph).outputs, [FusedOutput::Residual, FusedOutput::Norm], "{}", after.report);
}

#[test]
fn values_that_others_use_become_results() {
    let body = RMS_NORM.replace("return %norm, %add", "return %norm, %add, %sum, %rsqrt");
    let before = graph(&block("bf16", &body));
    let after = lowered(&before, &Options::default());
    use FusedOutput::{InverseRms, Norm, Residual, Sum};
    assert_eq!(fused(&after.graph).outputs, [Sum, Residual, Norm, InverseRms]);
    assert_eq!(kinds(&after.graph), ["fused"]);
    agree(&before, &after.graph, 2, 3, Arithmetic::Exact, 1e-9);
    let text = after.report.to_string();
    assert!(text.contains("one call gives sum, residual, norm, inverse_rms"), "{text}");
}

#[test]
fn the_report_names_what_is_left_of_a_call() {
    let after = lowered(&graph(&block("bf16", RMS_NORM)), &Options::default());
    assert_eq!(fused(&after.graph).outputs, [FusedOutput::Residual, FusedOutput::Norm]);
    let text = after.report.to_string();
    assert!(text.contains("one call gives residual, norm (") && !text.contains("inverse_rms"), "{text}");
}

#[test]
fn in_f32_the_order_of_factors_is_that_of_the_program() {
    for (name, body) in [("rms_norm", RMS_NORM), ("by hand", BY_HAND), ("gemma", GEMMA)] {
        let before = graph(&block("f32", &in_steps(body).replace("bf16", "f32")));
        let after = lowered(&before, &numerics(Numerics::Same));
        // A root under a fraction is another rounding than the kernels'.
        let is_fused = kinds(&after.graph).contains(&"fused".to_owned());
        assert_eq!(is_fused, name != "by hand", "{name}\n{}", after.report);
    }
}

/// FP8 codes of the norm, with scales that follow from it.
const TOKENS: &str = "
    %plain: f32[3,64] = cast(%norm)
    %abs: f32[3,64] = unary(%plain) op=abs
    %amax: f32[3,1] = reduce(%abs) op=amax dims=[1] keepdim=true
    %raw: f32[3,1] = binary(%amax) op=div scalar=448.0
    %scales: f32[3,1] = binary(%raw) op=maximum scalar=4.359654017857143e-06
    %inverse: f32[3,1] = unary(%scales) op=reciprocal
    %scaled_up: f32[3,64] = binary(%plain, %inverse) op=mul
    %low: f32[3,64] = binary(%scaled_up) op=maximum scalar=-448.0
    %high: f32[3,64] = binary(%low) op=minimum scalar=448.0
    %codes: e4m3[3,64] = cast(%high)
    return %codes, %scales, %add";

/// The same for groups of 16 neighbours, with powers of two.
const GROUPS: &str = "
    %plain: f32[3,64] = cast(%norm)
    %split: f32[3,4,16] = view(%plain) view=reshape
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
    return %codes, %scales, %add";

#[test]
fn scales_that_follow_from_the_norm_are_results() {
    use FusedOutput::{Codes, Residual, Scales};
    for (codes, how) in [(TOKENS, Quantize::Fp8Tokens), (GROUPS, Quantize::Fp8Groups(16))] {
        for (name, norm) in &SPELLINGS[..4] {
            let body = norm.replace("%narrow", "%rounded").replace("return %norm, %add", codes);
            let before = graph(&block("bf16", &body));
            let after = lowered(&before, &Options::default());
            assert_eq!(kinds(&after.graph), ["fused"], "{name}\n{}", after.report);
            let call = fused(&after.graph);
            assert_eq!((call.quantize, &call.outputs[..]), (how, &[Residual, Codes, Scales][..]), "{name}");
            agree(&before, &after.graph, 2, 4, Arithmetic::Exact, 1e-9);
            assert_eq!(Graph::from_text(&after.graph.to_text()).unwrap().to_json(), after.graph.to_json());
        }
    }
    // Another least scale is another function.
    let other = TOKENS.replace("4.359654017857143e-06", "1e-3");
    let after =
        lowered(&graph(&block("bf16", &RMS_NORM.replace("return %norm, %add", &other))), &Options::default());
    assert_eq!(fused(&after.graph).outputs, [Residual, FusedOutput::Norm]);
}

#[test]
fn codes_are_part_of_the_call() {
    let body = RMS_NORM.replace(
        "return %norm, %add",
        "%more: f32[3,64] = binary(%weighted) op=mul scalar=2.0
         %low: f32[3,64] = binary(%more) op=maximum scalar=-448.0
         %high: f32[3,64] = binary(%low) op=minimum scalar=448.0
         %codes: e4m3[3,64] = cast(%high)
         return %codes, %add",
    );
    let before = graph(&block("bf16", &body));
    let after = lowered(&before, &Options::default());
    assert_eq!(fused(&after.graph).outputs, [FusedOutput::Residual, FusedOutput::Codes], "{}", after.report);
    assert_eq!(fused(&after.graph).scale, Some(0.5));
    agree(&before, &after.graph, 2, 4, Arithmetic::Exact, 1e-9);
}

#[test]
fn a_scale_in_memory_stays_there() {
    let body = RMS_NORM.replace(
        "return %norm, %add",
        "%by: f32[1] = input()
         %plain: f32[3,64] = cast(%norm)
         %more: f32[3,64] = binary(%plain, %by) op=div
         %low: f32[3,64] = binary(%more) op=maximum scalar=-448.0
         %high: f32[3,64] = binary(%low) op=minimum scalar=448.0
         %codes: e4m3[3,64] = cast(%high)
         return %codes, %norm",
    );
    let before = graph(&block("bf16", &body));
    let after = lowered(&before, &Options::default());
    assert_eq!(fused(&after.graph).outputs, [FusedOutput::Norm, FusedOutput::Codes], "{}", after.report);
    assert_eq!((fused(&after.graph).args.len(), fused(&after.graph).scale), (3, None));
}

#[test]
fn what_does_not_fit_is_left_and_says_why() {
    let refused = |text: &str, because: &str| {
        let before = graph(text);
        let after = lowered(&before, &Options::default());
        let has_norm =
            after.graph.ops.iter().any(|op| matches!(&op.kind, Kind::Fused { fused } if fused.eps.is_some()));
        assert!(!has_norm, "{}", after.graph.to_text());
        assert!(because.is_empty() || after.report.to_string().contains(because), "{}", after.report);
        agree(&before, &after.graph, 2, 5, Arithmetic::Exact, 1e-9);
    };
    // A weight of another dtype: a peer's pass makes wrong numbers of it.
    refused(&block("bf16", RMS_NORM).replace("%weight: bf16", "%weight: f32"), "");
    // Another row length than 16 bytes fill.
    refused(&block("bf16", RMS_NORM).replace("64]", "60]"), "60 elements of bf16");
    // A residual that needs the sum.
    let circle = RMS_NORM.replace("binary(%sum, %residual) op=add", "binary(%sum, %own) op=add");
    let circle = format!("%own: bf16[3,64] = opaque(%sum) target=of_the_sum {circle}")
        .replace("of_the_sum ", "of_the_sum\n");
    refused(&block("bf16", &circle), "");
    // The maximum over the ranks is no sum.
    refused(&block("bf16", RMS_NORM).replace("red=sum", "red=max"), "");
    // A mean over something else than a row.
    let columns = RMS_NORM.replace("[3,1]", "[1,64]").replace("dims=[1]", "dims=[0]");
    refused(&block("bf16", &columns), "");
    // Integers have no norm.
    let added = "%add: i32[3,64] = binary(%sum, %residual) op=add\nreturn %add";
    refused(&block("i32", added), "not of f32, f16 or bf16");
}

/// Costs in which a fused call was measured to take so long, at any size.
fn with_fused_calls_of(nanoseconds: f64) -> Costs {
    let key = Key::new("fused_all_reduce", "bf16", 2, "2 × a processor");
    let table =
        Table::from_timings(vec!["one_shot".into()], vec![(1 << 20, vec![Timing::of(&[nanoseconds])])]);
    Costs::of(Device::Host).with_table(&key, &table.unwrap())
}

#[test]
fn a_call_that_is_predicted_to_be_slower_than_its_parts_is_refused() {
    let fuses = |text: &str, nanoseconds: f64, because: &str| {
        let before = graph(text);
        let costs = with_fused_calls_of(nanoseconds);
        let after = lower(&before, &World::default(), &costs, &Options::default());
        assert_eq!(check(&before, &after.decisions, &after.graph), []);
        assert!(after.report.to_string().contains(because), "{}", after.report);
        kinds(&after.graph).contains(&"fused".to_owned())
    };
    // In stream order a call takes 6 µs, and then a kernel of 1,664 bytes 2 µs and 166 ns.
    let text = block("bf16", RMS_NORM);
    assert!(fuses(&text, 8_166.0, "one call gives residual, norm"));
    let slower =
        "one call is predicted at 8167 ns, a call in stream order and the operations behind it at 8166 ns";
    assert!(!fuses(&text, 8_167.0, slower));
    // A call beside computation takes 30 µs, and a product of 86 µs hides it.
    let product = "%a: f32[128,128] = input()
         %product: f32[128,128] = matmul(%a, %a)
         %sum:";
    let text = text.replace("%sum:", product).replace("return", "return %product,");
    let hidden = "one call is predicted at 93886 ns, a call beside 85886 ns of computation and the operations behind it at 88052 ns";
    assert!(!fuses(&text, 8_000.0, hidden));
}

#[test]
fn by_the_built_in_figures_fused_calls_pay_at_all_sizes() {
    let residual = "%add: bf16[3,64] = binary(%sum, %residual) op=add\nreturn %add";
    for body in [RMS_NORM, BY_HAND, residual] {
        for device in [Device::Host, Device::H200] {
            for rows in [1, 4, 16, 64, 128, 256, 512, 1024, 2048, 65536] {
                let text = block("bf16", body).replace("64", "7168").replace("[3,", &format!("[{rows},"));
                let before = graph(&text.replace("[1,3,", &format!("[1,{rows},")));
                let world = World { device, ..World::default() };
                let after = lower(&before, &world, &Costs::of(device), &Options::default());
                let is_fused = kinds(&after.graph).contains(&"fused".to_owned());
                assert!(is_fused, "{rows} rows on {device}: {}", after.report);
            }
        }
    }
}

/// Σ(a + r) has the value of Σa + Σr, which another call gives: each call keeps its own result.
#[test]
fn equal_results_of_two_calls_stay_apart() {
    let body = "%other_start: bf16[3,64] = start(%sum) prim=all_reduce group=tp red=sum token=1
         %other: bf16[3,64] = wait(%other_start) tokens=[1]
         %add: bf16[3,64] = binary(%sum, %other) op=add
         %wide: bf16[3,64] = binary(%x, %sum) op=add
         %last_start: bf16[3,64] = start(%wide) prim=all_reduce group=tp red=sum token=2
         %last: bf16[3,64] = wait(%last_start) tokens=[2]
         return %add, %last, %sum";
    let before = graph(&block("bf16", body));
    let after = lowered(&before, &Options::default());
    assert_eq!(after.report.calls, [3, 3], "{}", after.report);
    agree(&before, &after.graph, 2, 7, Arithmetic::Exact, 1e-9);
}

/// Two outputs of equal value have memory of their own.
#[test]
fn equal_outputs_stay_apart() {
    let again = "%again: bf16[3,64] = binary(%residual, %sum) op=add\nreturn %norm, %add, %again";
    let before = graph(&block("bf16", &RMS_NORM.replace("return %norm, %add", again)));
    let after = lowered(&before, &Options::default());
    assert_eq!(kinds(&after.graph), ["fused", "copy"], "{}", after.report);
    agree(&before, &after.graph, 2, 8, Arithmetic::Exact, 1e-9);
}

#[test]
fn sizes_may_be_unknown() {
    let text = block("bf16", RMS_NORM).replace("[3,", "[s0,");
    let before = graph(&format!("sym s0 min 1 max 4096 hint 5\n{text}"));
    let after = lowered(&before, &Options::default());
    assert_eq!(kinds(&after.graph), ["fused"]);
    agree(&before, &after.graph, 2, 6, Arithmetic::Exact, 1e-9);
}
