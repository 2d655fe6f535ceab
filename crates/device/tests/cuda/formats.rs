//! What formats.cuh computes, on the host.

/// As `quotient` of formats.cuh.
fn quotient(x: f32, divisor: f32) -> f32 {
    let inverse = 1.0 / divisor;
    let q = x * inverse;
    (-q).mul_add(divisor, x).mul_add(inverse, q)
}

/// A code depends on which side of a boundary a quotient is: halfway between two codes of e4m3, a number of five bits.
/// Exponents make no difference, so all fractions of a dividend with all divisors that bring it near a boundary are a proof.
#[test]
fn a_quotient_is_on_the_right_side_of_every_boundary_between_codes() {
    // bf16, f16, and of f32 each 509th, as all would be a thousand million cases; they have been tried.
    for (bits, step) in [(8, 1), (11, 1), (24, 509)] {
        for fraction in (0..1_u32 << (bits - 1)).step_by(step) {
            let x = f32::from_bits(1.0_f32.to_bits() | fraction << (24 - bits));
            for boundary in (16..32).map(|sixteenths| sixteenths as f32 / 16.0) {
                let near = (x / boundary).to_bits();
                for divisor in (near - 4..=near + 4).map(f32::from_bits) {
                    let (found, exact) = (quotient(x, divisor), x / divisor);
                    let side = |q: f32| q.partial_cmp(&boundary);
                    assert_eq!(side(found), side(exact), "{x} / {divisor} near {boundary}");
                }
            }
        }
    }
}
