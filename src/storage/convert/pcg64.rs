//! NumPy's default generator, as far as the n-gram multipliers need it: seed sequence, PCG64 and bounded integers.
//! Owns bit-exactness with NumPy; never serves as a source of randomness for anything else.
//! Surprising fact: the bounds here are always above 2^32, so NumPy's buffered 32-bit path is never taken.

/// Words of the entropy pool of a seed sequence.
const POOL: usize = 4;

/// Running hash of a seed sequence: xor with a constant that is itself multiplied on, then multiply and fold.
struct Hash {
    constant: u32,
    multiplier: u32,
}

impl Hash {
    fn mix(&mut self, word: u32) -> u32 {
        let mixed = word ^ self.constant;
        self.constant = self.constant.wrapping_mul(self.multiplier);
        let mixed = mixed.wrapping_mul(self.constant);
        mixed ^ (mixed >> 16)
    }
}

/// Combines two pool words.
fn combine(x: u32, y: u32) -> u32 {
    let mixed = x.wrapping_mul(0xca01_f9dd).wrapping_sub(y.wrapping_mul(0x4973_f715));
    mixed ^ (mixed >> 16)
}

/// Eight words of state from a seed (NumPy `SeedSequence(seed).generate_state(8)`).
fn seed_words(seed: u64) -> [u32; 8] {
    let entropy = [seed as u32, (seed >> 32) as u32];
    let mut hash = Hash { constant: 0x43b0_d7e5, multiplier: 0x931e_8875 };
    let mut pool = [0u32; POOL];
    for (i, word) in pool.iter_mut().enumerate() {
        *word = hash.mix(entropy.get(i).copied().unwrap_or(0));
    }
    for source in 0..POOL {
        for target in 0..POOL {
            if source != target {
                pool[target] = combine(pool[target], hash.mix(pool[source]));
            }
        }
    }
    let mut hash = Hash { constant: 0x8b51_f9dd, multiplier: 0x58f3_8ded };
    std::array::from_fn(|i| hash.mix(pool[i % POOL]))
}

/// The PCG XSL-RR 128/64 generator.
pub(super) struct Pcg64 {
    state: u128,
    increment: u128,
}

impl Pcg64 {
    /// The generator of `numpy.random.default_rng(seed)`.
    pub(super) fn seeded(seed: u64) -> Self {
        let w = seed_words(seed);
        let wide = |i: usize| u128::from(w[i]) | u128::from(w[i + 1]) << 32;
        let (start, stream) = (wide(0) << 64 | wide(2), wide(4) << 64 | wide(6));
        let mut rng = Self { state: 0, increment: stream << 1 | 1 };
        rng.step();
        rng.state = rng.state.wrapping_add(start);
        rng.step();
        rng
    }

    fn step(&mut self) {
        const MULTIPLIER: u128 = 0x2360_ed05_1fc6_5da4_4385_df64_9fcc_f645;
        self.state = self.state.wrapping_mul(MULTIPLIER).wrapping_add(self.increment);
    }

    fn next(&mut self) -> u64 {
        self.step();
        let folded = (self.state >> 64) as u64 ^ self.state as u64;
        folded.rotate_right((self.state >> 122) as u32)
    }

    /// A number below `bound`, as `integers(0, bound)` draws it for bounds above 2^32: the high half of a product,
    /// drawn again while its low half lies in the biased part.
    pub(super) fn below(&mut self, bound: u64) -> u64 {
        assert!(bound > 1 << 32, "smaller bounds take another path in NumPy");
        let biased = bound.wrapping_neg() % bound;
        loop {
            let product = u128::from(self.next()) * u128::from(bound);
            if product as u64 >= biased {
                return (product >> 64) as u64;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_published_multipliers_come_out() {
        // Spec 4.2: multipliers of the two layers of Flash.
        let bound = (i64::MAX as u64 / 99_092) / 2;
        let draw = |layer: u64| {
            let mut rng = Pcg64::seeded(10_007 * layer);
            [(); 4].map(|()| rng.below(bound) * 2 + 1)
        };
        assert_eq!(bound, 46_539_438_283_891);
        assert_eq!(draw(1), [76_632_096_046_245, 4_839_876_093_313, 35_959_672_319_349, 73_987_337_458_391]);
        assert_eq!(draw(14), [67_716_810_739_261, 51_510_806_800_915, 30_921_347_202_721, 82_619_226_485_591]);
    }
}
