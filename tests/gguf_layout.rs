//! Classes of a file: the published sizes come out for the published geometry, and inconsistent files are refused.
//! Owns the tensor list of spec section 2; never writes a file.
//! Surprising fact: the 340 GiB file is only planned here, its directory takes a few kilobytes.

use ds4::quant::QuantType::{self, F16, F32, I8, IQ2_XXS, Q2_K, Q8_0};
use ds4::storage::gguf::{Directory, GgufWriter, Metadata, TensorSpec};
use ds4::storage::layout::Layout;
use ds4::units::{Bytes, ExpertIdx};

/// Metadata and tensors of DeepSeek V4.1 Flash Q2 (spec 1.1, 2.1 to 2.3).
fn flash() -> (Metadata, Vec<TensorSpec>) {
    let mut m = Metadata::new();
    m.insert("general.architecture", "deepseek41");
    m.insert("general.alignment", 16_384u32);
    for (key, value) in [
        ("num_hidden_layers", 40u32),
        ("n_routed_experts", 384),
        ("hidden_size", 5120),
        ("moe_intermediate_size", 2304),
    ] {
        m.insert(format!("deepseek41.{key}"), value);
    }
    let first = [
        57, 79, 81, 97, 121, 129, 133, 183, 189, 207, 211, 253, 277, 289, 307, 321, 339, 381, 393, 399, 403, 409, 447,
        463,
    ];
    let second = [
        477, 487, 499, 507, 511, 573, 609, 627, 667, 669, 693, 697, 711, 729, 759, 769, 781, 799, 813, 819, 841, 877,
        879, 889,
    ];
    m.insert("deepseek41.engram.encoding", "e4m3_e8m0_32_row264");
    m.insert("deepseek41.engram.layer_ids", vec![1u32, 14]);
    m.insert("deepseek41.engram.rows", vec![384_006_168u32, 384_016_682]);
    m.insert("deepseek41.engram.primes", first.iter().chain(&second).map(|d| 16_000_000 + d).collect::<Vec<u32>>());
    let mut tensors = Vec::new();
    let mut add =
        |name: String, ty: QuantType, dims: &[u64]| tensors.push(TensorSpec { name, ty, dims: dims.to_vec() });
    add("token_embd.weight".into(), F16, &[5120, 129_280]);
    add("output_norm.weight".into(), F32, &[5120]);
    add("output.weight".into(), Q8_0, &[5120, 129_280]);
    for layer in 0..40 {
        let mut put = |stem: &str, ty, dims: &[u64]| add(format!("blk.{layer}.{stem}"), ty, dims);
        for kind in ["attn", "ffn"] {
            put(&format!("hc_{kind}_fn.weight"), F16, &[20_480, 24]);
            put(&format!("hc_{kind}_base.weight"), F32, &[24]);
            put(&format!("hc_{kind}_scale.weight"), F32, &[3]);
            put(&format!("{kind}_norm.weight"), F32, &[5120]);
        }
        put("attn_sinks.weight", F32, &[64]);
        put("attn_q_a.weight", Q8_0, &[5120, 1280]);
        put("attn_q_a_norm.weight", F32, &[1280]);
        put("attn_q_b.weight", Q8_0, &[1280, 32_768]);
        put("attn_kv.weight", Q8_0, &[5120, 512]);
        put("attn_kv_a_norm.weight", F32, &[512]);
        put("attn_output_a.weight", Q8_0, &[4096, 8192]);
        put("attn_output_b.weight", Q8_0, &[8192, 5120]);
        put("ffn_gate_inp.weight", F32, &[5120, 384]);
        put("exp_probs_b.bias", F32, &[384]);
        put("exp_probs_b_vl.bias", F32, &[384]);
        put("ffn_gate_shexp.weight", Q8_0, &[5120, 2304]);
        put("ffn_up_shexp.weight", Q8_0, &[5120, 2304]);
        put("ffn_down_shexp.weight", Q8_0, &[2304, 5120]);
        put("ffn_gate_exps.weight", IQ2_XXS, &[5120, 2304, 384]);
        put("ffn_up_exps.weight", IQ2_XXS, &[5120, 2304, 384]);
        put("ffn_down_exps.weight", Q2_K, &[2304, 5120, 384]);
        if [2, 8, 14, 20].contains(&layer) {
            put("attn_compressor_kv.weight", F16, &[5120, 512]);
            put("attn_compressor_norm.weight", F32, &[512]);
            put("indexer.attn_k.weight", F16, &[512, 128]);
            put("indexer.k_norm.weight", F32, &[128]);
            if layer < 20 {
                put("attn_compressor_gate.weight", F16, &[5120, 512]);
            }
        }
        if [2, 8, 14, 20, 24, 28, 32, 36].contains(&layer) {
            put("indexer.attn_q_b.weight", F16, &[1280, 4096]);
            put("indexer.proj.weight", F16, &[5120, 32]);
        }
        if [1, 14].contains(&layer) {
            put("engram_q_norm.weight", F32, &[5120, 4]);
            put("engram_k_norm.weight", F32, &[5120, 4]);
            put("engram_kv.weight", F16, &[6144, 25_600]);
        }
    }
    add("blk.1.engram_embd.weight".into(), I8, &[264, 384_006_168]);
    add("blk.14.engram_embd.weight".into(), I8, &[264, 384_016_682]);
    (m, tensors)
}

fn directory(m: &Metadata, tensors: &[TensorSpec]) -> Directory {
    GgufWriter::new(m, tensors).unwrap().directory().clone()
}

#[test]
fn the_published_sizes_come_out() {
    let (m, tensors) = flash();
    let file = directory(&m, &tensors);
    let layout = Layout::from_gguf(&file).unwrap();
    // Spec 2.4.
    assert_eq!(layout.resident_bytes, Bytes(10_060_841_408));
    assert_eq!(layout.expert_bytes_total(), Bytes(152_882_380_800));
    assert_eq!(layout.table_bytes_total(), Bytes(101_377_628_352 + 101_380_404_048));
    assert_eq!((layout.experts.len(), layout.experts[39].layer.0, layout.tables.len()), (40, 39, 2));
    let classes = layout.size_classes();
    assert_eq!(classes.len(), 1);
    assert_eq!((classes[0].expert_bytes, classes[0].experts, classes[0].layers), (Bytes(9_953_280), 15_360, 40));
    let [gate, up, down] = layout.experts[3].extents(ExpertIdx(1));
    assert_eq!((gate.len, up.len, down.len), (3_041_280, 3_041_280, 3_870_720));
    assert_eq!((gate.offset % 4096, up.offset % 4096, down.offset % 4096), (2048, 2048, 0));
    let table = layout.tables[0];
    assert_eq!((table.row(1).offset - table.offset, table.row_bytes), (264, 264));
    // The file ends 3,248 bytes after the last row.
    let last = layout.tables[1];
    assert_eq!(file.file_len() - (last.offset + 264 * last.rows), 3_248);
    assert_eq!(last.offset - table.offset, 264_333_279_232 - 162_955_640_832);
}

#[test]
fn experts_of_several_types_make_several_classes() {
    let (m, mut tensors) = flash();
    for t in tensors.iter_mut().filter(|t| t.name.starts_with("blk.7.ffn_down_exps")) {
        t.ty = Q8_0;
    }
    let classes = Layout::from_gguf(&directory(&m, &tensors)).unwrap().size_classes();
    let sizes: Vec<(u32, u64)> = classes.iter().map(|c| (c.layers, c.experts)).collect();
    assert_eq!(sizes, [(39, 39 * 384), (1, 384)]);
    assert!(classes[0].expert_bytes < classes[1].expert_bytes);
}

#[test]
fn inconsistent_files_are_refused() {
    fn check(change: impl FnOnce(&mut Metadata, &mut Vec<TensorSpec>), text: &str) {
        let (mut m, mut tensors) = flash();
        change(&mut m, &mut tensors);
        let error = Layout::from_gguf(&directory(&m, &tensors)).expect_err(text).to_string();
        assert!(error.contains(text), "{error:?} lacks {text:?}");
    }
    fn tensor(
        name: &'static str,
        change: impl FnOnce(&mut TensorSpec),
    ) -> impl FnOnce(&mut Metadata, &mut Vec<TensorSpec>) {
        move |_, tensors| change(tensors.iter_mut().find(|t| t.name == name).unwrap())
    }
    fn key(
        key: &'static str,
        value: impl Into<ds4::storage::gguf::Value>,
    ) -> impl FnOnce(&mut Metadata, &mut Vec<TensorSpec>) {
        move |m, _| assert!(m.insert(key, value) || m.contains(key))
    }
    const DOWN: &str = "blk.7.ffn_down_exps.weight";
    const TABLE: &str = "blk.14.engram_embd.weight";
    check(key("general.architecture", "llama"), "architecture llama is not supported");
    check(|m, _| assert!(m.remove("general.architecture")), "general.architecture is missing");
    check(|m, _| assert!(m.remove("deepseek41.hidden_size")), "deepseek41.hidden_size is missing");
    check(key("deepseek41.n_routed_experts", "many"), "n_routed_experts is a string, expected u32");
    check(key("deepseek41.n_routed_experts", 70_000u32), "n_routed_experts is 70000, but 65535 is the limit");
    check(key("deepseek41.num_hidden_layers", 70_000u32), "num_hidden_layers is 70000, but 65535 is the limit");
    check(key("deepseek41.num_hidden_layers", 39u32), "belongs to layer 39, but the model has 39 layers");
    check(key("deepseek41.num_hidden_layers", 41u32), "blk.40.ffn_gate_exps.weight is missing");
    check(|_, t| t.retain(|t| t.name != DOWN), "blk.7.ffn_down_exps.weight is missing");
    check(tensor(DOWN, |t| t.dims[2] = 383), "[2304, 5120, 383], expected [2304, 5120, 384]");
    check(tensor(DOWN, |t| t.dims = vec![5120, 2304, 384]), "[5120, 2304, 384], expected [2304, 5120, 384]");
    check(tensor(TABLE, |t| t.dims[1] -= 1), "blk.14.engram_embd.weight has dimensions");
    check(
        tensor(TABLE, |t| (t.ty, t.dims) = (F16, vec![132, 384_016_682])),
        "blk.14.engram_embd.weight is F16, expected I8",
    );
    check(
        tensor(TABLE, |t| t.name = "blk.15.engram_embd.weight".into()),
        "blk.15.engram_embd.weight is an n-gram table of a layer",
    );
    check(|_, t| t.retain(|t| t.name != TABLE), "blk.14.engram_embd.weight is missing");
    check(key("deepseek41.engram.encoding", "lloyd4_e5m3_32_r136"), "encoding lloyd4_e5m3_32_r136 is unknown");
    check(key("deepseek41.engram.conversion_underway", true), "are being converted");
    check(key("deepseek41.engram.rows", vec![1u32]), "deepseek41.engram.rows has 1 entries, expected 2");
    check(key("deepseek41.engram.primes", vec![2u32, 3, 5]), "deepseek41.engram.primes has 3 entries");
    check(
        key("deepseek41.engram.primes", vec![384_006_168u32, 384_016_681]),
        "layer 14: its primes sum to 384016681, but it has 384016682 rows",
    );
    check(key("deepseek41.engram.primes", vec![u64::MAX; 4]), "layer 1: its primes sum to 18446744073709551615");
    check(|m, _| assert!(m.remove("deepseek41.engram.layer_ids")), "deepseek41.engram.layer_ids is missing");
}

#[test]
fn a_vocabulary_of_129k_tokens_is_parsed() {
    let (mut m, tensors) = flash();
    let words = (0..129_280).map(|i| format!("word{i}"));
    m.insert("tokenizer.ggml.tokens", words.clone().collect::<ds4::storage::gguf::StringArray>());
    m.insert("tokenizer.ggml.merges", words.map(|w| format!("{w} x")).collect::<ds4::storage::gguf::StringArray>());
    m.insert("tokenizer.ggml.token_type", vec![1i32; 129_280]);
    m.insert("deepseek41.engram.token_map", (0..129_280).collect::<Vec<u32>>());
    let started = std::time::Instant::now();
    let file = directory(&m, &tensors);
    println!("written and parsed in {:?}, {} bytes", started.elapsed(), file.data_start());
    assert_eq!(file.metadata().str_array("tokenizer.ggml.tokens").unwrap().get(129_279), Some("word129279"));
    assert_eq!(file.tensors().len(), tensors.len());
}
