//! Schedule and keys of a synthetic V4 file (spec 1).
//! Never a shape or a value of a tensor. Surprising fact: the list of ratios is one longer than the model has layers, as in published
//! files: the last entry describes a block that drafts tokens.

use super::dims::{Dims, FIRST_RATIO_LAYER, HASHED};
use crate::storage::convert::dialect4::{DENSE, Rest, SIZE_KEYS, add_rest};
use crate::storage::convert::names::{OVERLAPPED, Schedule};
use crate::storage::gguf::Metadata;

/// Window only, then 4 and 128 in turns.
pub(super) fn schedule(dims: &Dims) -> Schedule {
    let (layers, first) = (dims.get("num_hidden_layers"), dims.get(FIRST_RATIO_LAYER));
    let ratio = |layer: u32| match layer.checked_sub(first) {
        None => 0,
        Some(behind) => [OVERLAPPED, DENSE][behind as usize % 2],
    };
    Schedule::of_ratios((0..layers).map(ratio).collect(), dims.get(HASHED).min(layers))
}

/// Adds the keys of spec 1.1.
pub(super) fn describe(dims: &Dims, schedule: &Schedule, m: &mut Metadata) {
    for (key, size) in SIZE_KEYS {
        m.insert(format!("deepseek4.{key}"), dims.get(size));
    }
    let floats = [
        ("attention.layer_norm_rms_epsilon", 1e-6f32),
        ("hyper_connection.epsilon", 1e-6),
        ("expert_weights_scale", 1.5),
        ("rope.scaling.factor", 16.0),
        ("rope.scaling.yarn_beta_fast", 32.0),
        ("rope.scaling.yarn_beta_slow", 1.0),
        ("rope.freq_base", dims.get("rope_theta") as f32),
        ("attention.compress_rope_freq_base", dims.get("compress_rope_theta") as f32),
    ];
    for (name, value) in floats {
        m.insert(format!("deepseek4.{name}"), value);
    }
    let ratios: Vec<u32> = schedule.ratios.iter().copied().chain([0]).collect();
    let rest = Rest {
        hidden: dims.get("hidden_size"),
        streams: dims.get("hc_mult"),
        layers: dims.get("num_hidden_layers"),
        hashed: schedule.hashed,
        ratios: &ratios,
        clamp: 10.0,
        yarn_positions: 65_536,
        normalise: true,
    };
    add_rest(m, &rest);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::storage::convert::Arch;
    use crate::storage::synth::Shape;
    use crate::storage::synth::geometry::Geometry;

    /// Spec 1.2 and 2.5: the number of tensors of the published files.
    #[test]
    fn the_full_shape_is_the_published_one() {
        let dims = Dims::of(Arch::DeepSeek4, Shape::Full);
        let g = Geometry::new(&dims).unwrap();
        let mut ratios = vec![0, 0];
        ratios.extend([4, 128].repeat(20));
        ratios.push(4);
        assert_eq!(g.schedule.ratios, ratios);
        assert_eq!(g.schedule.hashed, 3);
        assert_eq!(g.tensors().len(), 1328);
        let dims_of = |name: &str| g.tensors().into_iter().find(|t| t.name == name).map(|t| t.dims);
        assert_eq!(dims_of("blk.2.attn_compressor_ape.weight"), Some(vec![1024, 4]));
        assert_eq!(dims_of("blk.3.attn_compressor_ape.weight"), Some(vec![512, 128]));
        assert_eq!(dims_of("blk.2.ffn_gate_tid2eid.weight"), Some(vec![6, 129_280]));
        assert_eq!(dims_of("blk.3.ffn_gate_tid2eid.weight"), None);
        assert_eq!(dims_of("blk.2.exp_probs_b.bias"), None);
    }
}
