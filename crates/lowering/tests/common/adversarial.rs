//! Programs with values that look alike: pairs that differ in one attribute, with a call on each.

use std::fmt::Write;

use super::Chance;

/// Values of one type that are computed alike: `%N_a` and `%N_b`.
struct Twins {
    dtype: &'static str,
    shape: &'static str,
}

/// A program of two or three pairs of twins, with collectives on them, and sums, residuals and norms of what comes.
pub fn program(seed: u64) -> String {
    let mut chance = Chance(seed ^ 0xA5A5_5A5A_1234);
    let hint = [1, 3, 9, 2][seed as usize % 4];
    let mut text = format!(
        "sym s0 min 1 max 9 hint {hint}\ngroup tp size 2\ngroup one size 1\n%x: f32[4,8] = input()\n%y: f32[4,8] = input()\n\
         %row: f32[8] = input()\n%column: f32[4,1] = input()\n%cube: f32[4,2,2] = input()\n%wide: f64[4,8] = input()\n\
         %half: bf16[4,8] = input()\n%small: i8[4,8] = input()\n%large: i32[4,8] = input()\n%rows: f32[s0,8] = input()\n\
         %narrow: f16[4,8] = input()\n%tall: f32[16,8] = input()\n%box: f32[4,4,2] = input()\n%part: f32[s0,4] = input()\n\
         %across: f32[2,s0] = input()\n%few: f32[4+(s0-5)//2] = input()\n",
    );
    let (mut outputs, mut token) = (Vec::new(), 0);
    for pair in 0..2 + chance.below(2) {
        let Twins { dtype, shape } = twins(&mut text, pair, &mut chance);
        let (prim, result) = match chance.below(8) {
            0 => (["broadcast root=0", "broadcast root=1"][chance.below(2)].to_owned(), shape),
            1 if shape == "[4,8]" => ("all_gather".to_owned(), "[8,8]"),
            _ => (format!("all_reduce red={}", ["sum", "max", "sum"][chance.below(3)]), shape),
        };
        let mut each = Vec::new();
        for side in ["a", "b"] {
            let is_alone = chance.below(8) == 0 && prim.starts_with("all_reduce");
            let group = if is_alone { "one" } else { "tp" };
            let _ = write!(
                text,
                "%s{pair}{side}: {dtype}{result} = start(%{pair}_{side}) group={group} token={token} prim={prim}\n\
                 %w{pair}{side}: {dtype}{result} = wait(%s{pair}{side}) tokens=[{token}]\n"
            );
            token += 1;
            each.push(followed(&mut text, pair, side, (dtype, result), &mut chance));
        }
        // The memory of calls that are not returned may be shared.
        if chance.below(2) == 0 {
            let op = ["add", "sub"][chance.below(2)];
            let _ = writeln!(text, "%d{pair}: {dtype}{result} = binary({}, {}) op={op}", each[0], each[1]);
            outputs.push(format!("%d{pair}"));
        } else {
            outputs.extend(each);
        }
    }
    outputs.sort();
    outputs.dedup();
    text + &format!("return {}\n", outputs.join(", "))
}

/// What comes behind a call: nothing, a residual, or a norm.
fn followed(
    text: &mut String,
    pair: usize,
    side: &str,
    (dtype, shape): (&str, &str),
    chance: &mut Chance,
) -> String {
    let id = format!("{pair}{side}");
    if (dtype, shape) != ("f32", "[4,8]") || chance.below(2) == 0 {
        return format!("%w{id}");
    }
    let residual = ["%x", "%y"][chance.below(2)];
    let (scalar, keepdim) = (["0.01", "0.02"][chance.below(2)], chance.below(4) > 0);
    let _ = writeln!(
        text,
        "%r{id}: f32[4,8] = binary(%w{id}, {residual}) op=add\n%q{id}: f32[4,8] = binary(%r{id}, %r{id}) op=mul"
    );
    let _ = match keepdim {
        true => writeln!(text, "%m{id}: f32[4,1] = reduce(%q{id}) op=mean dims=[1] keepdim=true"),
        false => writeln!(
            text,
            "%n{id}: f32[4] = reduce(%q{id}) op=mean dims=[1]\n%m{id}: f32[4,1] = view(%n{id}) view=reshape"
        ),
    };
    let _ = write!(
        text,
        "%e{id}: f32[4,1] = binary(%m{id}) op=add scalar={scalar}\n%k{id}: f32[4,1] = unary(%e{id}) op=rsqrt\n\
         %o{id}: f32[4,8] = binary(%r{id}, %k{id}) op=mul\n%v{id}: f32[4,8] = binary(%o{id}, %row) op=mul\n"
    );
    [format!("%v{id}"), format!("%r{id}")][chance.below(4) / 3].clone()
}

/// The lines of both twins. `A` and `B` stand for what differs.
fn twins(text: &mut String, pair: usize, chance: &mut Chance) -> Twins {
    let mut pick = |list: &[&'static str]| list[chance.below(list.len())];
    // (elements, shape, the last lines of a twin, what differs)
    let (dtype, shape, body, differs): (_, _, &str, [&str; 2]) = match pick(&[
        "offset", "stride", "written", "wrap", "keepdim", "constant", "dims", "turn", "permute", "expand",
        "width", "side", "opaque", "function", "symbol", "gaps", "rounded", "scalar", "same", "inplace",
        "rows", "columns", "copied", "quotient", "segments", "exchange", "last", "halves",
    ]) {
        "offset" => (
            "f32",
            "[4,4]",
            "%@c: f32[4,4] strides [8,1] offset A = view(%x) view=strided\n%@: f32[4,4] = copy(%@c)",
            [pick(&["0", "1", "4"]), pick(&["0", "2", "3"])],
        ),
        "stride" => (
            "f32",
            "[4,4]",
            "%@c: f32[4,4] strides A = view(%x) view=strided\n%@: f32[4,4] = copy(%@c)",
            [pick(&["[8,1]", "[4,1]", "[1,4]"]), pick(&["[8,2]", "[1,8]", "[0,1]", "[4,1]"])],
        ),
        "written" => (
            "f32",
            "[4,8]",
            "%@c: f32[4,8] = unary(%x) op=A\n%@s: f32[2,8] offset 8 = view(%@c) view=strided\n\
             %@t: f32[2,8] = view(%y) view=strided\n%@w: f32[2,8] offset 8 = assign(%@s, %@t)\n%@: f32[4,8] = view(%@w) view=strided",
            [pick(&["neg", "abs"]), pick(&["abs", "neg", "relu"])],
        ),
        "wrap" => (
            "i32",
            "[4,8]",
            "%@n: A[4,8] = cast(%small)\n%@d: A[4,8] = binary(%@n, %@n) op=add\n%@: i32[4,8] = cast(%@d)",
            [pick(&["i8", "i32"]), pick(&["i32", "i64", "i8"])],
        ),
        "keepdim" => (
            "f32",
            "[4,4]",
            "%@r: f32[4] = reduce(%cube) op=sum dims=[1,2]\n%@v: f32A = view(%@r) view=reshape\n\
             %@z: f32[4,4] strides [8,1] = view(%x) view=strided\n%@: f32[4,4] = binary(%@z, %@v) op=add",
            [pick(&["[4,1]", "[4]"]), pick(&["[4]", "[1,4]", "[4,1]"])],
        ),
        "constant" => (
            "f64",
            "[4,8]",
            "%@: f64[4,8] = binary(%wide) op=mul scalar=A",
            [pick(&["0.1", "1.5"]), pick(&["0.10000000000000002", "0.1", "1.5000001"])],
        ),
        "dims" => (
            "f32",
            "[4]",
            "%@t: f32[4,4] strides [8,2] = view(%x) view=strided\n%@c: f32[4,4] = copy(%@t)\n%@: f32[4] = reduce(%@c) op=sum dims=A",
            [pick(&["[0]", "[1]"]), pick(&["[1]", "[0]"])],
        ),
        "turn" => (
            "f32",
            "[4,4]",
            "%@t: f32[4,4] strides [8,1] = view(%x) view=strided\n%@c: f32[4,4] = copy(%@t)\n\
             %@p: f32[4,4] strides A = view(%@c) view=strided\n%@: f32[4,4] = unary(%@p) op=neg",
            [pick(&["[1,4]", "[4,1]"]), pick(&["[4,1]", "[1,4]"])],
        ),
        "permute" => (
            "f32",
            "[4,4]",
            "%@t: f32[4,4] strides [8,1] = view(%x) view=strided\n%@c: f32[4,4] = copy(%@t)\n\
             %@p: f32[4,4] strides A = view(%@c) view={\"permute\":C}\n%@: f32[4,4] = copy(%@p)",
            [pick(&["[1,4]", "[4,1]"]), pick(&["[4,1]", "[1,4]"])],
        ),
        "expand" => (
            "f32",
            "[4,4]",
            "%@r: f32[4] = reduce(%x) op=sum dims=[1]\n%@v: f32A = view(%@r) view=reshape\n\
             %@e: f32[4,4] strides B = view(%@v) view=expand\n%@: f32[4,4] = copy(%@e)",
            [pick(&["[4,1]", "[1,4]"]), pick(&["[1,4]", "[4,1]"])],
        ),
        "width" => (
            "i32",
            "[4]",
            "%@n: A[4,8] = cast(%large)\n%@r: A[4] = reduce(%@n) op=sum dims=[1]\n%@: i32[4] = cast(%@r)",
            [pick(&["i8", "i32"]), pick(&["i32", "i64"])],
        ),
        "side" => (
            "f32",
            "[4,8]",
            "%@: f32[4,8] = binary(%x) op=sub scalar=1 swapped=A",
            [pick(&["false", "true"]), pick(&["true", "false"])],
        ),
        "opaque" => (
            "f32",
            "[4,8]",
            "%@: f32[4,8] = opaque(%x, %y) target=mixed attributes=A",
            [pick(&["p", "q"]), pick(&["q", "p"])],
        ),
        "function" => (
            "f32",
            "[4,8]",
            "%@: f32[4,8] = binary(%x, %y) op=A",
            [pick(&["sub", "maximum"]), pick(&["add", "minimum", "sub"])],
        ),
        "symbol" => (
            "f32",
            "[s0,4]",
            "%@c: f32[s0,4] strides [8,1] offset A = view(%rows) view=strided\n%@: f32[s0,4] = unary(%@c) op=neg",
            [pick(&["0", "2"]), pick(&["4", "0"])],
        ),
        "gaps" => (
            "f32",
            "[4,4]",
            "%@g: f32[4,8] strides [16,1] = unary(%x) op=neg\n%@v: f32[4,4] strides [16,1] offset A = view(%@g) view=strided\n%@: f32[4,4] = copy(%@v)",
            [pick(&["0", "4"]), pick(&["2", "0"])],
        ),
        "rounded" => (
            "f32",
            "[4,8]",
            "%@q: f32[4,8] = binary(%x, %y) op=mul\n%@n: A[4,8] = cast(%@q)\n%@: f32[4,8] = cast(%@n)",
            [pick(&["i8", "f32"]), pick(&["f32", "i8", "i32"])],
        ),
        "scalar" => (
            "f32",
            "[4,8]",
            "%@f: f32[8] = full() value=A\n%@e: f32[4,8] strides [0,1] = view(%@f) view=expand\n%@: f32[4,8] = binary(%half, %@e) op=mul",
            [pick(&["1", "2"]), pick(&["2", "1.0000001"])],
        ),
        "inplace" => (
            "f32",
            "[4,8]",
            "%@c: f32[4,8] = copy(%A)\n%@i: f32[4,8] = sync(%@c) prim=all_reduce group=tp red=sum in_place=true\n%@: f32[4,8] = unary(%@i) op=neg",
            [pick(&["x", "y"]), pick(&["y", "x"])],
        ),
        "rows" => (
            "f32",
            "[4]",
            "%@c: f32[16,8] = unary(%tall) op=A\n%@s: f32[s0,4] strides [8,1] = view(%@c) view=strided\n\
             %@w: f32[s0,4] strides [8,1] = assign(%@s, %part)\n%@v: f32[4] offset 16 = view(%@w) view=strided\n%@: f32[4] = copy(%@v)",
            ["neg", pick(&["abs", "relu"])],
        ),
        "columns" => (
            "f32",
            "[1]",
            "%@c: f32[16,8] = unary(%tall) op=A\n%@s: f32[2,s0] strides [16,1] = view(%@c) view=strided\n\
             %@w: f32[2,s0] strides [16,1] = assign(%@s, %across)\n%@v: f32[1] offset 19 = view(%@w) view=strided\n%@: f32[1] = copy(%@v)",
            ["neg", pick(&["abs", "relu"])],
        ),
        "copied" => (
            "f32",
            "[1]",
            "%@i: f32[2,s0] strides [100,1] = view(%tall) view=strided\n%@c: f32[2,s0] = copy(%@i)\n\
             %@v: f32[1] offset 1 = view(A) view=strided\n%@: f32[1] = copy(%@v)",
            ["%@c", pick(&["%tall", "%@c"])],
        ),
        "quotient" => (
            "f32",
            "[1]",
            "%@c: f32[16,8] = unary(%tall) op=A\n%@s: f32[4+(s0-5)//2] = view(%@c) view=strided\n\
             %@w: f32[4+(s0-5)//2] = assign(%@s, %few)\n%@v: f32[1] offset 3 = view(%@w) view=strided\n%@: f32[1] = copy(%@v)",
            ["neg", pick(&["abs", "relu"])],
        ),
        "segments" => (
            "f32",
            "[8]",
            "%@c: f32[4,8] = copy(%x)\n%@p: f32[8] = view(%@c) view=strided\n%@q: f32[8] offset A = view(%@c) view=strided\n\
             %@m: f32[8]; %@n: f32[8] offset A = sync(%@p, %@q) prim=all_reduce group=tp red=sum in_place=true\n\
             %@v: f32[8] offset 8 = view(%@m) view=strided\n%@: f32[8] = copy(%@v)",
            [pick(&["8", "16"]), pick(&["24", "8"])],
        ),
        "exchange" => {
            let calls = [
                "f32[8,2,2] = sync(%box) group=tp prim=shard_dim_all_to_all dims=[0,1]",
                "f32[2,8,2] = sync(%box) group=tp prim=shard_dim_all_to_all dims=[1,0]",
                "f32[4,4,2] = sync(%box) group=tp prim=all_to_all",
                "f32[4,4,2] = sync(%box) group=tp prim=all_to_all sends=[2,2] receives=[2,2]",
                "f32[4,4,2] = sync(%box) group=tp prim=broadcast root=1",
            ];
            ("f32", "[32]", "%@o: A\n%@: f32[32] = copy(%@o)", [pick(&calls), pick(&calls)])
        }
        "last" => (
            "f32",
            "[s0,8]",
            "%@c: f32[s0,8] = unary(%rows) op=neg\n%@s: f32[8] offset A = view(%@c) view=strided\n\
             %@w: f32[8] offset A = assign(%@s, %row)\n%@: f32[s0,8] = view(%@w) view=strided",
            [pick(&["0", "8*s0-8"]), pick(&["8*s0-8", "0", "8*s0", "64*s0"])],
        ),
        "halves" => (
            "f16",
            "[4,8]",
            "%@: f16[4,8] = binary(%narrow, %narrow) op=A",
            [pick(&["mul", "add"]), pick(&["add", "maximum"])],
        ),
        _ => ("f32", "[4,8]", "%@: f32[4,8] = binary(%x, %row) op=mul", ["", ""]),
    };
    for (side, what) in [("a", differs[0]), ("b", differs[1])] {
        let strides = if what == "[4,1]" { "[1,0]" } else { "[0,1]" };
        let order = if what == "[1,4]" { "[1,0]" } else { "[0,1]" };
        let lines = body.replace('A', what).replace('B', strides).replace('C', order);
        let lines = lines.replace('@', &format!("{pair}_{side}"));
        let _ = writeln!(text, "{lines}");
    }
    Twins { dtype, shape }
}
