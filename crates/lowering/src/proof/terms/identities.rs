//! The identities by which different terms are made one.
//!
//! A row says what is equal, for which elements, and gives it as two programs. A test runs the programs of every row in
//! the interpreter on random elements; the terms of the two are equal, and are not where the row is left out.

use crate::{numerics::Numerics, types::Element};

/// Elements for which an identity holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Elements {
    None,
    Integers,
    Floats,
    All,
}

impl Elements {
    fn has(self, element: Element) -> bool {
        match self {
            Self::None => false,
            Self::Integers => element.number().is_some() && !element.is_float(),
            Self::Floats => element.is_float(),
            Self::All => true,
        }
    }
}

/// A row of the table.
#[cfg_attr(not(test), allow(dead_code))] // what is said of an identity is for the test
pub(crate) struct Row {
    pub(crate) identity: Identity,
    /// For which elements it holds bit for bit.
    pub(crate) to_the_bit: Elements,
    /// For which it holds among real numbers: those that [`Numerics::Close`] uses it for.
    pub(crate) of_reals: Elements,
    /// The number of roundings to the result's elements by which each of the two programs may differ from the exact result, relative to
    /// the largest number on the way.
    pub(crate) roundings: u32,
    /// Two programs that are equal: `%r` of `%x`, `%y` and `%z`, which are `T[4,8]`; `W` has all values of `T`.
    pub(crate) sides: [&'static str; 2],
}

macro_rules! identities {
    ($($(#[doc = $doc:literal])* $identity:ident: $bits:ident, $reals:ident, $roundings:literal, $left:literal, $right:literal;)*) => {
        /// An identity.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub(crate) enum Identity {
            $($(#[doc = $doc])* $identity,)*
        }

        /// All identities, in the order of their numbers.
        pub(crate) const TABLE: &[Row] = &[
            $(Row {
                identity: Identity::$identity,
                to_the_bit: Elements::$bits,
                of_reals: Elements::$reals,
                roundings: $roundings,
                sides: [$left, $right],
            },)*
        ];
    };
}

identities! {
    /// `x + y = y + x`, and so of `·`, `max` and `min`.
    OperandsCommute: All, All, 1,
        "%r: T[4,8] = binary(%x, %y) op=maximum",
        "%r: T[4,8] = binary(%y, %x) op=maximum";
    /// A cast of elements that the new type has changes nothing.
    CastThatKeeps: All, All, 0,
        "%w: W[4,8] = cast(%x)\n%r: T[4,8] = cast(%w)",
        "%r: T[4,8] = copy(%x)";
    /// `x¹ = x`
    FirstPower: Floats, Floats, 0,
        "%r: T[4,8] = binary(%x) op=pow scalar=1",
        "%r: T[4,8] = copy(%x)";
    /// `x² = x · x`
    Square: Floats, Floats, 1,
        "%r: T[4,8] = binary(%x) op=pow scalar=2",
        "%r: T[4,8] = binary(%x, %x) op=mul";
    /// `(x + y) + z = x + (y + z)`: integers wrap.
    SumsHaveNoOrder: Integers, All, 3,
        "%a: T[4,8] = binary(%x, %y) op=add\n%r: T[4,8] = binary(%a, %z) op=add",
        "%a: T[4,8] = binary(%z, %y) op=add\n%r: T[4,8] = binary(%x, %a) op=add";
    /// `(x · y) · z = x · (y · z)`
    ProductsHaveNoOrder: Integers, All, 3,
        "%a: T[4,8] = binary(%x, %y) op=mul\n%r: T[4,8] = binary(%a, %z) op=mul",
        "%a: T[4,8] = binary(%z, %y) op=mul\n%r: T[4,8] = binary(%x, %a) op=mul";
    /// `(x + a) + b = x + (a + b)` and `(x · a) · b = x · (a · b)` of numbers `a` and `b`. Of floating-point numbers `a + b` and `a · b`
    /// must be exact, and neither too large nor too small for f32.
    NumbersJoin: Integers, All, 4,
        "%a: T[4,8] = binary(%x) op=mul scalar=3\n%b: T[4,8] = binary(%a) op=mul scalar=5\n%c: T[4,8] = binary(%b) op=add scalar=2\n%r: T[4,8] = binary(%c) op=add scalar=4",
        "%a: T[4,8] = binary(%x) op=mul scalar=15\n%r: T[4,8] = binary(%a) op=add scalar=6";
    /// `x + 0 = x`, `x · 1 = x`
    NeutralNumber: Integers, All, 0,
        "%a: T[4,8] = binary(%x) op=mul scalar=1\n%r: T[4,8] = binary(%a) op=add scalar=0",
        "%r: T[4,8] = copy(%x)";
    /// `−x = −1 · x`
    NegIsProduct: None, Floats, 1,
        "%r: T[4,8] = unary(%x) op=neg",
        "%r: T[4,8] = binary(%x) op=mul scalar=-1";
    /// `x − y = x + (−y)`
    DifferenceIsSum: None, Floats, 1,
        "%r: T[4,8] = binary(%x, %y) op=sub",
        "%n: T[4,8] = unary(%y) op=neg\n%r: T[4,8] = binary(%x, %n) op=add";
    /// `x / y = x · (1 / y)`
    QuotientIsProduct: None, Floats, 3,
        "%r: T[4,8] = binary(%x, %y) op=div",
        "%n: T[4,8] = unary(%y) op=reciprocal\n%r: T[4,8] = binary(%x, %n) op=mul";
    /// The reciprocal of a number is the nearest number, which must be neither too large nor too small for f32.
    ReciprocalOfNumber: None, Floats, 1,
        "%r: T[4,8] = binary(%x) op=div scalar=4",
        "%r: T[4,8] = binary(%x) op=mul scalar=0.25";
    /// `1 / (x · y) = (1 / x) · (1 / y)`, `1 / (1 / x) = x`, `1 / √x = x^(−½)`
    ReciprocalInside: None, Floats, 4,
        "%s: T[4,8] = unary(%x) op=sqrt\n%p: T[4,8] = binary(%s, %y) op=mul\n%r: T[4,8] = unary(%p) op=reciprocal",
        "%s: T[4,8] = unary(%x) op=rsqrt\n%n: T[4,8] = unary(%y) op=reciprocal\n%r: T[4,8] = binary(%s, %n) op=mul";
    /// `x^½ = √x`, `x^(−½) = 1 / √x`, `x⁻¹ = 1 / x`
    PowerIsRoot: None, Floats, 2,
        "%r: T[4,8] = binary(%x) op=pow scalar=-0.5",
        "%r: T[4,8] = unary(%x) op=rsqrt";
    /// `2^⌈log₂ x⌉` is the least power of two that is not less than `x`. (The logarithm's rounding may take it past a power.)
    PowerOfLogarithm: None, Floats, 4,
        "%n: T[4,8]; %c: e4m3[4,8]; %r: f32[4,1] = fused(%x) group=tp args=[] outputs=[\"norm\",\"codes\",\"scales\"] eps=1 quantize={\"fp8_groups\":8}",
        "%s: T[4,8] = sync(%x) prim=all_reduce group=tp red=sum\n%w: f32[4,8] = cast(%s)\n%q: f32[4,8] = binary(%w, %w) op=mul\n\
         %m: f32[4,1] = reduce(%q) op=mean dims=[1] keepdim=true\n%e: f32[4,1] = binary(%m) op=add scalar=1\n\
         %i: f32[4,1] = unary(%e) op=rsqrt\n%o: f32[4,8] = binary(%w, %i) op=mul\n%n: T[4,8] = cast(%o)\n%u: f32[4,8] = cast(%n)\n\
         %a: f32[4,8] = unary(%u) op=abs\n%g: f32[4,1] = reduce(%a) op=amax dims=[1] keepdim=true\n\
         %d: f32[4,1] = binary(%g) op=div scalar=448\n%l: f32[4,1] = binary(%d) op=maximum scalar=1e-10\n\
         %p: f32[4,1] = unary(%l) op=log2\n%k: f32[4,1] = unary(%p) op=ceil\n%r: f32[4,1] = unary(%k) op=exp2";
    /// The mean of `n` numbers is their sum times the number nearest to `1 / n`.
    MeanIsSum: None, Floats, 12,
        "%r: T[4,1] = reduce(%x) op=mean dims=[1] keepdim=true",
        "%s: T[4,1] = reduce(%x) op=sum dims=[1] keepdim=true\n%r: T[4,1] = binary(%s) op=mul scalar=0.125";
    /// `−x`, `|x|`, `max(x, 0)` and the greatest of some numbers `x` are elements of the type that `x` has.
    ElementsStay: Floats, Floats, 0,
        "%w: W[4,8] = cast(%x)\n%a: W[4,8] = unary(%w) op=neg\n%b: W[4,8] = unary(%a) op=abs\n%c: W[4,8] = unary(%b) op=relu\n\
         %d: W[4,1] = reduce(%c) op=amax dims=[1] keepdim=true\n%n: T[4,1] = cast(%d)\n%r: W[4,1] = cast(%n)",
        "%w: W[4,8] = cast(%x)\n%a: W[4,8] = unary(%w) op=neg\n%b: W[4,8] = unary(%a) op=abs\n%c: W[4,8] = unary(%b) op=relu\n\
         %r: W[4,1] = reduce(%c) op=amax dims=[1] keepdim=true";
    /// A number that is converted is the nearest number of the new type.
    CastOfNumber: Floats, Floats, 0,
        "%i: i32[4,8] = full() value=16777217\n%r: T[4,8] = cast(%i)",
        "%r: T[4,8] = full() value=16777216";
    /// A rounding may be left out.
    RoundingLess: None, Floats, 2,
        "%h: bf16[4,8] = cast(%x)\n%r: T[4,8] = cast(%h)",
        "%r: T[4,8] = copy(%x)";
    /// `Σ(x + y) = Σx + Σy` over the ranks of a group, and a sign comes outside.
    SumOfSums: Integers, All, 6,
        "%a: T[4,8] = binary(%x, %y) op=add\n%r: T[4,8] = sync(%a) prim=all_reduce group=tp red=sum",
        "%a: T[4,8] = sync(%x) prim=all_reduce group=tp red=sum\n%b: T[4,8] = sync(%y) prim=all_reduce group=tp red=sum\n%r: T[4,8] = binary(%a, %b) op=add";
    /// `Σc = n · c` over `n` ranks, of a number.
    SumOfNumber: Integers, All, 0,
        "%c: T[4,8] = full() value=3\n%r: T[4,8] = sync(%c) prim=all_reduce group=tp red=sum",
        "%r: T[4,8] = full() value=6";
    /// What a collective of one rank gives is what the rank has.
    RankAlone: All, All, 0,
        "%r: T[4,8] = sync(%x) prim=all_reduce group=one red=sum",
        "%r: T[4,8] = copy(%x)";
    /// A number at other places is the number.
    MoveOfNumber: All, All, 0,
        "%f: T[8] = full() value=3\n%e: T[4,8] strides [0,1] = view(%f) view=expand\n%r: T[4,8] = copy(%e)",
        "%r: T[4,8] = full() value=3";
    /// All elements in their order are the elements.
    MoveToItself: All, All, 0,
        "%v: T[4,8] = view(%x) view=strided\n%r: T[4,8] = copy(%v)",
        "%r: T[4,8] = copy(%x)";
    /// A move of moved elements is one move.
    MoveOfMove: All, All, 0,
        "%p: T[8,4] strides [1,8] = view(%x) view={\"permute\":[1,0]}\n%c: T[8,4] = copy(%p)\n%q: T[4,8] strides [1,4] = view(%c) view={\"permute\":[1,0]}\n%r: T[4,8] = copy(%q)",
        "%r: T[4,8] = copy(%x)";
    /// A function of moved elements is one of the elements, moved.
    MoveOfFunction: All, All, 0,
        "%a: T[4,8] = binary(%x, %y) op=add\n%p: T[8,4] strides [1,8] = view(%a) view={\"permute\":[1,0]}\n%r: T[8,4] = copy(%p)",
        "%p: T[8,4] strides [1,8] = view(%x) view={\"permute\":[1,0]}\n%q: T[8,4] strides [1,8] = view(%y) view={\"permute\":[1,0]}\n%r: T[8,4] = binary(%p, %q) op=add";
    /// What has been written to all places is there.
    WriteOfAll: All, All, 0,
        "%c: T[4,8] = copy(%x)\n%w: T[4,8] = assign(%c, %y)\n%v: T[4,8] = view(%w) view=strided\n%r: T[4,8] = copy(%v)",
        "%r: T[4,8] = copy(%y)";
    /// What has just been written is read.
    ReadOfWrite: All, All, 0,
        "%c: T[4,8] = copy(%x)\n%s: T[2,8] offset 8 = view(%c) view=strided\n%y2: T[2,8] = view(%y) view=strided\n%w: T[2,8] offset 8 = assign(%s, %y2)\n%v: T[1,8] offset 16 = view(%w) view=strided\n%r: T[1,8] = copy(%v)",
        "%v: T[1,8] offset 8 = view(%y) view=strided\n%r: T[1,8] = copy(%v)";
}

impl Identity {
    /// Its row.
    pub(crate) fn row(self) -> &'static Row {
        &TABLE[self as usize]
    }
}

/// Which identities are used.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Enabled {
    numerics: Numerics,
    left_out: Option<Identity>,
}

impl Enabled {
    /// All that hold under these numerics.
    pub(crate) fn all(numerics: Numerics) -> Self {
        Self { numerics, left_out: None }
    }

    /// All but one.
    #[cfg(test)]
    pub(crate) fn without(numerics: Numerics, identity: Identity) -> Self {
        Self { numerics, left_out: Some(identity) }
    }

    /// Whether an identity is used for all elements.
    pub(crate) fn has(self, identity: Identity) -> bool {
        self.left_out != Some(identity)
    }

    /// Whether an identity is used for such elements.
    pub(crate) fn may(self, identity: Identity, element: Element) -> bool {
        let row = identity.row();
        let elements = match self.numerics {
            Numerics::Same => row.to_the_bit,
            Numerics::Close => row.of_reals,
        };
        self.has(identity) && elements.has(element)
    }
}
