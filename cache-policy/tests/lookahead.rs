//! Route memory and prefetch through the directory: what is predicted, what may be evicted for it, what is counted.
//! Owns small synthetic texts. Never uses recorded ones. Surprising fact: a prediction has to prove itself first.

use cache_policy::route_memory::Prediction;
use cache_policy::{ClassShape, Directory, ExpertIdx, ExpertKey, LayerIdx, Placement, RouteMemory, by_name, policies};

const LAYERS: usize = 3;
const EXPERTS: u16 = 64;

/// Route of a token: layer 0 by its id alone, the others by the two ids before it as well.
fn route(ids: [u32; 3], layer: usize) -> [ExpertIdx; 2] {
    let seed = match layer {
        0 => ids[0] * 7,
        _ => ids[0] * 7 + ids[1] * 5 + ids[2] * 3 + layer as u32,
    };
    [ExpertIdx((seed % 32) as u16), ExpertIdx((32 + seed * 11 % 32) as u16)]
}

/// Runs `text` through `memory`; returns the predictions made for each token.
fn run(memory: &mut RouteMemory, text: &[u32]) -> Vec<Vec<Prediction>> {
    let mut all = Vec::new();
    for t in 0..text.len() {
        let mut predictions = Vec::new();
        memory.begin_token(text[t], &mut predictions);
        let past = |back: usize| t.checked_sub(back).map_or(0, |i| text[i]);
        for layer in 0..LAYERS {
            memory.record(LayerIdx(layer as u16), &route([past(0), past(1), past(2)], layer));
        }
        all.push(predictions);
    }
    all
}

fn text(tokens: u32) -> Vec<u32> {
    (0..tokens).map(|i| (i * i + i / 3) % 23).collect()
}

fn has(predictions: &[Prediction], layer: usize, expert: ExpertIdx) -> bool {
    predictions.iter().any(|p| p.key == ExpertKey::new(layer as u16, expert.0))
}

#[test]
fn a_repeated_text_is_predicted_in_full_and_with_confidence() {
    // Room enough that no context displaces another.
    let mut memory = RouteMemory::new(LAYERS, 2, EXPERTS, 1 << 14);
    let text = text(60);
    for _ in 0..6 {
        run(&mut memory, &text);
    }
    let last = run(&mut memory, &text);
    for t in 2..60 {
        for layer in 0..LAYERS {
            for expert in route([text[t], text[t - 1], text[t - 2]], layer) {
                assert!(has(&last[t], layer, expert), "token {t} layer {layer}");
            }
        }
        assert!(last[t].iter().any(|p| p.probability > 0.7), "token {t}: {:?}", last[t]);
        assert!(last[t].is_sorted_by_key(|p| p.key.layer), "layers come in order");
    }
}

#[test]
fn nothing_is_predicted_of_unseen_tokens() {
    let mut memory = RouteMemory::new(LAYERS, 2, EXPERTS, 64);
    let ids: Vec<u32> = (0..40).collect();
    assert!(run(&mut memory, &ids).iter().all(|p| p.is_empty()));
}

#[test]
fn a_first_match_is_not_believed_yet() {
    let mut memory = RouteMemory::new(LAYERS, 2, EXPERTS, 64);
    let predictions = run(&mut memory, &[1, 2, 3, 4, 5, 1]);
    assert!(!predictions[5].is_empty());
    assert!(predictions[5].iter().all(|p| p.probability == 0.0));
}

#[test]
fn a_session_does_not_continue_the_one_before() {
    let mut memory = RouteMemory::new(LAYERS, 2, EXPERTS, 64);
    let text = text(20);
    run(&mut memory, &text);
    run(&mut memory, &text);
    let known = run(&mut memory, &text[18..20]);
    memory.begin_session();
    let fresh = run(&mut memory, &text[18..20]);
    let best = |p: &[Prediction]| p.iter().map(|p| p.probability).fold(0.0, f32::max);
    assert!(best(&fresh[0]) < best(&known[1]), "one token is weaker evidence than three");
}

#[test]
fn the_memory_is_bounded_and_forgets_the_oldest() {
    let mut memory = RouteMemory::new(LAYERS, 2, EXPERTS, 16);
    run(&mut memory, &[9]);
    run(&mut memory, &(100..115).collect::<Vec<_>>());
    assert!(run(&mut memory, &[9])[0].is_empty(), "sixteen tokens ago");
    assert!(!run(&mut memory, &[9])[0].is_empty(), "one token ago");
}

fn directory(policy: &str, slots: usize) -> Directory {
    let shape = ClassShape { layers: vec![(LayerIdx(0), 16), (LayerIdx(1), 16)], slots };
    Directory::new(&[shape], &by_name(policy).expect("known"))
}

fn serve(d: &mut Directory, layer: u16, experts: &[u16]) -> Vec<Placement> {
    let (ids, mut out) = (experts.iter().map(|&e| ExpertIdx(e)).collect::<Vec<_>>(), Vec::new());
    d.request(LayerIdx(layer), &ids, &mut |_| false, &mut out).expect("fits");
    out
}

#[test]
fn a_prefetch_takes_no_wanted_slot() {
    for (name, _) in policies::KNOWN {
        let mut d = directory(name, 4);
        serve(&mut d, 0, &[0, 1]);
        serve(&mut d, 1, &[0, 1]);
        d.begin_token();
        assert!(d.expect(ExpertKey::new(0, 0)) && !d.expect(ExpertKey::new(0, 9)), "{name}");
        assert!(d.expect(ExpertKey::new(1, 1)), "{name}");
        let mut gone = Vec::new();
        for expert in [5, 6] {
            let placed = d.prefetch(ExpertKey::new(1, expert), &mut |_| false);
            let Some(Placement::Fill { evict: Some(victim) }) = placed else { panic!("{name}: {placed:?}") };
            gone.push(victim);
        }
        gone.sort_unstable();
        assert_eq!(gone, [ExpertKey::new(0, 1), ExpertKey::new(1, 0)], "{name}");
        // Everything left is expected or was just prefetched.
        assert_eq!(d.prefetch(ExpertKey::new(1, 7), &mut |_| false), None, "{name}");
        assert_eq!(d.prefetch(ExpertKey::new(1, 5), &mut |_| false), None, "{name}: cached already");
        assert_eq!(serve(&mut d, 1, &[5]), [Placement::Hit], "{name}");
        // The announced token is the one that the request belonged to; the next layer 0 starts another.
        let epoch = d.epoch();
        serve(&mut d, 0, &[0]);
        assert_eq!(d.epoch().0, epoch.0 + 1, "{name}");
    }
}

#[test]
fn a_wasted_prefetch_leaves_first() {
    for (name, _) in policies::KNOWN {
        let mut d = directory(name, 4);
        serve(&mut d, 0, &[0, 1]);
        serve(&mut d, 1, &[0]);
        d.begin_token();
        assert_eq!(d.prefetch(ExpertKey::new(1, 9), &mut |_| false), Some(Placement::Fill { evict: None }), "{name}");
        serve(&mut d, 0, &[0]);
        d.begin_token();
        let evict = Some(ExpertKey::new(1, 9));
        assert_eq!(serve(&mut d, 0, &[7]), [Placement::Fill { evict }], "{name}");
    }
}
