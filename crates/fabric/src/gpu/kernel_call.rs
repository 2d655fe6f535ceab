//! What a kernel takes, for Rust and CUDA alike.

/// Makes the Rust type of a kernel's argument and the text of its CUDA struct from one list of fields.
///
/// The type is plain data with the layout of C, and a [`KernelArgument`](antiphon_device::cuda::KernelArgument). Its `SOURCE` has the
/// struct, and stands among the [`SOURCES`](crate::gpu::Family::SOURCES) of a family ahead of the texts that use it.
///
/// | field | in Rust | in CUDA |
/// | --- | --- | --- |
/// | `count: u32` | `count: u32` | `u32 count;` |
/// | `output: *mut u8`, `*const i32` | `output: u64`, an address | `u8* output;`, `const i32*` |
/// | `input: [*const u8; MAX_WORLD]`, `[u32; 2]` | `input: [u64; MAX_WORLD]` | `const u8* input[MAX_WORLD];` |
/// | `region: RegionCall as region_call` | `region: RegionCall` | `region_call region;`, of the same layout |
///
/// A struct of which arrays lie in memory may be aligned, so that it is loaded as a whole: `= "item" align(16) {`.
///
/// The length of an array is the same expression in both; the program [defines](crate::gpu::Family::define) its names, or a text ahead does.
///
/// ```
/// use antiphon_fabric::gpu::kernel_call;
///
/// const MOST: usize = 2;
///
/// kernel_call! {
///     /// The blocks of a launch.
///     pub struct Blocks = "blocks" {
///         /// Where each begins.
///         at: [*const u8; MOST],
///         count: u32,
///     }
/// }
/// assert_eq!(Blocks::SOURCE.text, "struct blocks {\n    const u8* at[MOST];\n    u32 count;\n};\n");
/// assert_eq!(size_of::<Blocks>(), 24);
/// ```
#[macro_export]
#[doc(hidden)]
macro_rules! gpu_kernel_call {
    (
        $(#[$meta:meta])*
        $visibility:vis struct $Name:ident $(<const $parameter:ident: usize>)? = $cuda:literal $(align($align:literal))? { $($fields:tt)* }
    ) => {
        $crate::gpu_kernel_call! {
            @fields
            { $(#[$meta])* $visibility struct $Name [$($parameter)?] = $cuda [$($align)?] }
            [] [] $($fields)*
        }
    };

    // Each field goes into the list of Rust and into the text of CUDA.
    (@fields $head:tt [$($rust:tt)*] [$($text:tt)*]
        $(#[$doc:meta])* $v:vis $field:ident: $type:ty as $cuda:ident, $($rest:tt)*
    ) => {
        $crate::gpu_kernel_call! {
            @fields $head
            [$($rust)* $(#[$doc])* $v $field: $type,]
            [$($text)* "    ", stringify!($cuda), " ", stringify!($field), ";\n",] $($rest)*
        }
    };
    (@fields $head:tt [$($rust:tt)*] [$($text:tt)*]
        $(#[$doc:meta])* $v:vis $field:ident: *const $to:ident, $($rest:tt)*
    ) => {
        $crate::gpu_kernel_call! {
            @fields $head
            [$($rust)* $(#[$doc])* $v $field: u64,]
            [$($text)* "    const ", stringify!($to), "* ", stringify!($field), ";\n",] $($rest)*
        }
    };
    (@fields $head:tt [$($rust:tt)*] [$($text:tt)*]
        $(#[$doc:meta])* $v:vis $field:ident: *mut $to:ident, $($rest:tt)*
    ) => {
        $crate::gpu_kernel_call! {
            @fields $head
            [$($rust)* $(#[$doc])* $v $field: u64,]
            [$($text)* "    ", stringify!($to), "* ", stringify!($field), ";\n",] $($rest)*
        }
    };
    (@fields $head:tt [$($rust:tt)*] [$($text:tt)*]
        $(#[$doc:meta])* $v:vis $field:ident: [*const $to:ident; $length:expr], $($rest:tt)*
    ) => {
        $crate::gpu_kernel_call! {
            @fields $head
            [$($rust)* $(#[$doc])* $v $field: [u64; $length],]
            [$($text)* "    const ", stringify!($to), "* ", stringify!($field), "[", stringify!($length), "];\n",] $($rest)*
        }
    };
    (@fields $head:tt [$($rust:tt)*] [$($text:tt)*]
        $(#[$doc:meta])* $v:vis $field:ident: [*mut $to:ident; $length:expr], $($rest:tt)*
    ) => {
        $crate::gpu_kernel_call! {
            @fields $head
            [$($rust)* $(#[$doc])* $v $field: [u64; $length],]
            [$($text)* "    ", stringify!($to), "* ", stringify!($field), "[", stringify!($length), "];\n",] $($rest)*
        }
    };
    (@fields $head:tt [$($rust:tt)*] [$($text:tt)*]
        $(#[$doc:meta])* $v:vis $field:ident: [$number:ident; $length:expr], $($rest:tt)*
    ) => {
        $crate::gpu_kernel_call! {
            @fields $head
            [$($rust)* $(#[$doc])* $v $field: [$number; $length],]
            [$($text)* "    ", stringify!($number), " ", stringify!($field), "[", stringify!($length), "];\n",] $($rest)*
        }
    };
    (@fields $head:tt [$($rust:tt)*] [$($text:tt)*]
        $(#[$doc:meta])* $v:vis $field:ident: $number:ident, $($rest:tt)*
    ) => {
        $crate::gpu_kernel_call! {
            @fields $head
            [$($rust)* $(#[$doc])* $v $field: $number,]
            [$($text)* "    ", stringify!($number), " ", stringify!($field), ";\n",] $($rest)*
        }
    };
    (@fields { $(#[$meta:meta])* $visibility:vis struct $Name:ident [$($parameter:ident)?] = $cuda:literal [$($align:literal)?] }
        [$($rust:tt)*] [$($text:tt)*]
    ) => {
        $(#[$meta])*
        #[derive(Clone, Copy)]
        #[repr(C $(, align($align))?)]
        $visibility struct $Name $(<const $parameter: usize>)? { $($rust)* }

        // SAFETY: plain data, with the layout of the struct in `SOURCE`, which has the same fields.
        unsafe impl $(<const $parameter: usize>)? antiphon_device::cuda::KernelArgument for $Name $(<$parameter>)? {}

        impl $(<const $parameter: usize>)? $Name $(<$parameter>)? {
            /// The struct of CUDA.
            $visibility const SOURCE: $crate::gpu::Source = $crate::gpu::Source::new(
                concat!($cuda, ".cuh"),
                concat!("struct ", $("alignas(", stringify!($align), ") ",)? $cuda, " {\n", $($text)* "};\n"),
            );
        }
    };
}
