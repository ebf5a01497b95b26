//! Sums in a fixed order of 16 lanes, which compilers turn into vector code.
//! Never reorders by width or instruction set. Surprising fact: products are rounded before they are added (no fused
//! multiply-add), because a machine without one would be slow where it has to imitate it.

const LANES: usize = 16;

#[inline(always)]
fn fold(lanes: [f32; LANES]) -> f32 {
    let mut half = LANES / 2;
    let mut sums = lanes;
    while half > 0 {
        for i in 0..half {
            sums[i] += sums[i + half];
        }
        half /= 2;
    }
    sums[0]
}

/// `sum a_i * b_i` over the shorter length.
#[inline(always)]
pub fn dot(a: &[f32], b: &[f32]) -> f32 {
    let len = a.len().min(b.len());
    let (a, b) = (&a[..len], &b[..len]);
    let (a_chunks, a_tail) = a.as_chunks::<LANES>();
    let (b_chunks, b_tail) = b.as_chunks::<LANES>();
    let mut lanes = [0.0f32; LANES];
    for (x, y) in a_chunks.iter().zip(b_chunks) {
        for i in 0..LANES {
            lanes[i] += x[i] * y[i];
        }
    }
    for (i, (x, y)) in a_tail.iter().zip(b_tail).enumerate() {
        lanes[i] += x * y;
    }
    fold(lanes)
}

/// `sum a_i * b_i * c_i * d_i`, all of the same length, multiplied as `(a * b) * (c * d)`.
pub fn dot4(a: &[f32], b: &[f32], c: &[f32], d: &[f32]) -> f32 {
    let mut lanes = [0.0f32; LANES];
    for (i, (((a, b), c), d)) in a.iter().zip(b).zip(c).zip(d).enumerate() {
        lanes[i % LANES] += (a * b) * (c * d);
    }
    fold(lanes)
}

/// `y_i += weight * x_i`.
#[inline(always)]
pub fn add_scaled(weight: f32, x: &[f32], y: &mut [f32]) {
    for (y, x) in y.iter_mut().zip(x) {
        *y += weight * x;
    }
}

/// `1 / sqrt(mean(x^2) + eps)`.
pub fn rms_factor(x: &[f32], eps: f32) -> f32 {
    1.0 / (dot(x, x) / x.len() as f32 + eps).sqrt()
}

/// `e^x`, taken in F64 and rounded once: the same bits from every C library and every device, which `f32::exp` does not promise.
pub fn exp(x: f32) -> f32 {
    f64::from(x).exp() as f32
}

/// Logistic function.
pub fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_equal_double_precision_within_rounding() {
        for len in [0, 1, 15, 16, 17, 64, 100] {
            let a: Vec<f32> = (0..len).map(|i| (i as f32 * 0.37).sin()).collect();
            let b: Vec<f32> = (0..len).map(|i| (i as f32 * 0.11).cos()).collect();
            let wide: f64 = a.iter().zip(&b).map(|(x, y)| f64::from(*x) * f64::from(*y)).sum();
            assert!((f64::from(dot(&a, &b)) - wide).abs() < 1e-5, "len {len}");
            let wide: f64 = a.iter().zip(&b).map(|(x, y)| (f64::from(*x) * f64::from(*y)).powi(2)).sum();
            assert!((f64::from(dot4(&a, &b, &a, &b)) - wide).abs() < 1e-5, "len {len}");
        }
    }
}
