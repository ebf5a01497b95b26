//! The model of spec deepseek-v4, 3.15, "Golden model": six layers whose weights follow from tensor names.
//! Never reads a file. Surprising fact: the table of the specification was computed in F64 by a program written from its text alone.

use super::{MetaValue, Source};

const HIDDEN: u64 = 256;
const VOCAB: u64 = 64;
const HEADS: u64 = 4;
const DIM: u64 = 128;
const Q_RANK: u64 = 64;
const GROUPS: u64 = 2;
const O_RANK: u64 = 32;
const INDEX_HEADS: u64 = 16;
const EXPERTS: u64 = 8;
const USED: u64 = 2;
const WIDTH: u64 = 256;
const HASHED: u64 = 2;
const RATIOS: [u64; 6] = [0, 0, 4, 128, 4, 128];

/// Token `i` of the text.
pub fn token(i: usize) -> u32 {
    ((7 * i * i + 3 * i + 11) % VOCAB as usize) as u32
}

/// Values in -1..1 by name and index.
fn uniform(name: &str, count: u64) -> impl Iterator<Item = f64> {
    let hash = name.bytes().fold(0xcbf2_9ce4_8422_2325u64, |h, b| (h ^ u64::from(b)).wrapping_mul(0x0100_0000_01b3));
    (0..count).map(move |i| {
        let mut z = hash.wrapping_add((i + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^= z >> 31;
        (z >> 40) as f64 / f64::from(1 << 23) - 1.0
    })
}

/// Mean and width of a tensor's values.
fn spread(name: &str, dims: &[u64]) -> (f64, f64) {
    let is = |part: &str| name.contains(part);
    match name {
        "token_embd.weight" => (0.0, 1.0),
        _ if is("norm") => (1.0, 0.25),
        _ if is("_scale") => (1.0, 0.5),
        _ if is("exp_probs_b") => (0.0, 0.3),
        _ if is("sinks") || is("_base") || is("_ape") => (0.0, 0.7),
        _ => (0.0, (3.0 / dims[0] as f64).sqrt()),
    }
}

impl Source {
    fn make(&mut self, name: String, dims: &[u64]) {
        let (mean, width) = spread(&name, dims);
        let values: Vec<f32> = uniform(&name, dims.iter().product()).map(|u| (mean + width * u) as f32).collect();
        self.put(name, dims.to_vec(), &values);
    }
}

/// The model.
pub fn model() -> Source {
    let mut s = Source::default();
    keys(&mut s);
    s.make("token_embd.weight".into(), &[HIDDEN, VOCAB]);
    s.make("output_hc_fn.weight".into(), &[4 * HIDDEN, 4]);
    s.make("output_hc_scale.weight".into(), &[1]);
    s.make("output_hc_base.weight".into(), &[4]);
    s.make("output_norm.weight".into(), &[HIDDEN]);
    s.make("output.weight".into(), &[HIDDEN, VOCAB]);
    for (layer, ratio) in RATIOS.into_iter().enumerate() {
        let name = |tensor: &str| format!("blk.{layer}.{tensor}.weight");
        for part in ["attn", "ffn"] {
            s.make(name(&format!("hc_{part}_fn")), &[4 * HIDDEN, 24]);
            s.make(name(&format!("hc_{part}_scale")), &[3]);
            s.make(name(&format!("hc_{part}_base")), &[24]);
            s.make(name(&format!("{part}_norm")), &[HIDDEN]);
        }
        s.make(name("attn_q_a"), &[HIDDEN, Q_RANK]);
        s.make(name("attn_q_a_norm"), &[Q_RANK]);
        s.make(name("attn_q_b"), &[Q_RANK, HEADS * DIM]);
        s.make(name("attn_kv"), &[HIDDEN, DIM]);
        s.make(name("attn_kv_a_norm"), &[DIM]);
        s.make(name("attn_sinks"), &[HEADS]);
        s.make(name("attn_output_a"), &[HEADS / GROUPS * DIM, GROUPS * O_RANK]);
        s.make(name("attn_output_b"), &[GROUPS * O_RANK, HIDDEN]);
        let kinds = [("attn", ratio > 0), ("indexer", ratio == 4)];
        for (kind, _) in kinds.into_iter().filter(|(_, has)| *has) {
            let row = if ratio == 4 { 2 * DIM } else { DIM };
            s.make(name(&format!("{kind}_compressor_kv")), &[HIDDEN, row]);
            s.make(name(&format!("{kind}_compressor_gate")), &[HIDDEN, row]);
            s.make(name(&format!("{kind}_compressor_ape")), &[row, ratio]);
            s.make(name(&format!("{kind}_compressor_norm")), &[DIM]);
        }
        if ratio == 4 {
            s.make(name("indexer.attn_q_b"), &[Q_RANK, INDEX_HEADS * DIM]);
            s.make(name("indexer.proj"), &[HIDDEN, INDEX_HEADS]);
        }
        s.make(name("ffn_gate_inp"), &[HIDDEN, EXPERTS]);
        if (layer as u64) < HASHED {
            let expert = |t: u64, k: u64| ((t + 3 * k + layer as u64) % EXPERTS) as i32;
            let ids: Vec<i32> = (0..VOCAB).flat_map(|t| (0..USED).map(move |k| expert(t, k))).collect();
            s.put_ids(name("ffn_gate_tid2eid"), vec![USED, VOCAB], &ids);
        } else {
            s.make(format!("blk.{layer}.exp_probs_b.bias"), &[EXPERTS]);
        }
        for (part, inputs, outputs) in [("gate", HIDDEN, WIDTH), ("up", HIDDEN, WIDTH), ("down", WIDTH, HIDDEN)] {
            s.make(name(&format!("ffn_{part}_shexp")), &[inputs, outputs]);
            s.make(name(&format!("ffn_{part}_exps")), &[inputs, outputs, EXPERTS]);
        }
    }
    s
}

fn keys(s: &mut Source) {
    s.keys.insert("general.architecture".into(), MetaValue::Text("deepseek4"));
    for (name, value) in [
        ("block_count", RATIOS.len() as u64),
        ("vocab_size", VOCAB),
        ("embedding_length", HIDDEN),
        ("attention.head_count", HEADS),
        ("attention.head_count_kv", 1),
        ("attention.key_length", DIM),
        ("attention.value_length", DIM),
        ("attention.q_lora_rank", Q_RANK),
        ("attention.output_lora_rank", O_RANK),
        ("attention.output_group_count", GROUPS),
        ("attention.sliding_window", 8),
        ("attention.compress_rope_freq_base", 160_000),
        ("attention.indexer.head_count", INDEX_HEADS),
        ("attention.indexer.key_length", DIM),
        ("attention.indexer.top_k", 4),
        ("rope.dimension_count", 64),
        ("rope.freq_base", 10_000),
        ("expert_count", EXPERTS),
        ("expert_used_count", USED),
        ("expert_shared_count", 1),
        ("expert_feed_forward_length", WIDTH),
        ("hash_layer_count", HASHED),
        ("hyper_connection.count", 4),
        ("hyper_connection.sinkhorn_iterations", 20),
    ] {
        s.set(name, MetaValue::Uint(value));
    }
    for (name, value) in [
        ("attention.layer_norm_rms_epsilon", 1e-6),
        ("hyper_connection.epsilon", 1e-6),
        ("expert_weights_scale", 1.5),
        ("swiglu_clamp_exp", 1.0),
    ] {
        s.set(name, MetaValue::Float(value));
    }
    s.set("attention.compress_ratios", MetaValue::Uints(RATIOS.to_vec()));
}
