//! The trace format: what is written comes back, in any chunks, and every way of damage is told.
//! Owns small synthetic traces. Never reads files. Surprising fact: a cut trace still gives every whole block.

use cache_policy::{
    Bytes, Event, ExpertIdx, ExpertKey, LayerIdx, Phase, TraceError, TraceHeader, TraceLayer, TraceReader, TraceWriter,
};
use proptest::prelude::*;

fn header() -> TraceHeader {
    let layer = |layer, experts, top_k| TraceLayer {
        layer: LayerIdx(layer),
        experts,
        top_k,
        expert_bytes: Bytes(4096 * u64::from(top_k)),
    };
    TraceHeader { model: [7; 32], layers: vec![layer(1, 384, 6), layer(2, 24, 4), layer(5, 1, 1)] }
}

/// An event that owns its experts.
#[derive(Clone, PartialEq, Debug)]
enum Owned {
    Session(u32),
    Prefill,
    Decode,
    Token(u32, u32),
    Preload(u16, u16),
    Overlap(u32),
    Route(u16, Vec<u16>),
    Favour(u16, Vec<u16>),
}

fn write(events: &[Owned]) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut writer = TraceWriter::new(&header()).expect("a sound header");
    for event in events {
        match event {
            Owned::Session(number) => writer.session(*number),
            Owned::Prefill => writer.phase(Phase::Prefill),
            Owned::Decode => writer.phase(Phase::Decode),
            Owned::Token(position, id) => writer.token(*position, *id),
            Owned::Preload(layer, expert) => {
                writer.preload(ExpertKey::new(*layer, *expert)).expect("an expert of this model");
            }
            Owned::Overlap(requests) => writer.overlap(*requests),
            Owned::Favour(layer, experts) => {
                let experts: Vec<_> = experts.iter().map(|&e| ExpertIdx(e)).collect();
                writer.favour(LayerIdx(*layer), &experts).expect("experts of this model");
            }
            Owned::Route(layer, experts) => {
                let experts: Vec<_> = experts.iter().map(|&e| ExpertIdx(e)).collect();
                writer.route(LayerIdx(*layer), &experts).expect("a route of this model");
            }
        }
        writer.drain(&mut |b| bytes.extend_from_slice(b));
    }
    writer.finish(&mut |b| bytes.extend_from_slice(b));
    bytes
}

fn read(bytes: &[u8], chunk: usize) -> Result<Vec<Owned>, TraceError> {
    let (mut reader, mut events) = (TraceReader::new(), Vec::new());
    for piece in bytes.chunks(chunk.max(1)) {
        reader.feed(piece);
        while let Some(event) = reader.next()? {
            events.push(match event {
                Event::Session(number) => Owned::Session(number),
                Event::Phase(Phase::Prefill) => Owned::Prefill,
                Event::Phase(Phase::Decode) => Owned::Decode,
                Event::Token { position, id } => Owned::Token(position, id),
                Event::Preload(key) => Owned::Preload(key.layer.0, key.expert.0),
                Event::Overlap(requests) => Owned::Overlap(requests),
                Event::Favour { layer, experts } => Owned::Favour(layer.0, experts.iter().map(|e| e.0).collect()),
                Event::Route { layer, experts } => Owned::Route(layer.0, experts.iter().map(|e| e.0).collect()),
            });
        }
    }
    assert!(bytes.is_empty() || reader.header().is_none_or(|h| *h == header()));
    reader.finish().map(|()| events)
}

fn event() -> impl Strategy<Value = Owned> {
    let route = |layer, experts: u16, most: usize| {
        prop::sample::subsequence((0..experts).collect::<Vec<_>>(), 0..=most)
            .prop_shuffle()
            .prop_map(move |e| Owned::Route(layer, e))
    };
    prop_oneof![
        1 => any::<u32>().prop_map(Owned::Session),
        1 => Just(Owned::Prefill),
        1 => Just(Owned::Decode),
        3 => (any::<u32>(), any::<u32>()).prop_map(|(p, t)| Owned::Token(p, t)),
        1 => (0..384u16).prop_map(|e| Owned::Preload(1, e)),
        1 => (0..24u16).prop_map(|e| Owned::Preload(2, e)),
        1 => any::<u32>().prop_map(Owned::Overlap),
        4 => route(1, 384, 384),
        4 => route(2, 24, 4),
        2 => route(5, 1, 1),
        1 => prop::sample::subsequence((0..24).collect::<Vec<u16>>(), 0..=24)
            .prop_shuffle()
            .prop_map(|e| Owned::Favour(2, e)),
    ]
}

/// `tokens` tokens of full routes.
fn decode(tokens: u16) -> Vec<Owned> {
    let mut events = vec![Owned::Session(0), Owned::Decode];
    for t in 0..tokens {
        events.push(Owned::Token(u32::from(t), 1000));
        events.push(Owned::Route(1, (0..6).map(|i| (t % 384 + i * 60) % 384).collect()));
        events.push(Owned::Route(2, (0..4).map(|i| (t + i * 5) % 24).collect()));
        events.push(Owned::Route(5, vec![0]));
    }
    events
}

proptest! {
    #[test]
    fn what_is_written_comes_back(events in prop::collection::vec(event(), 0..80), chunk in 1..500usize) {
        let bytes = write(&events);
        prop_assert_eq!(read(&bytes, chunk), Ok(events));
    }

    #[test]
    fn any_flipped_bit_is_told(at in any::<prop::sample::Index>(), bit in 0..8u32) {
        let mut bytes = write(&decode(20));
        let at = at.index(bytes.len());
        bytes[at] ^= 1 << bit;
        prop_assert!(read(&bytes, 64).is_err());
    }

    #[test]
    fn noise_never_panics(noise in prop::collection::vec(any::<u8>(), 0..400), chunk in 1..90usize) {
        let _ = read(&noise, chunk);
        // Behind a sound header, as a block with a sound checksum: every record is then hostile.
        let sound = write(&[]);
        let mut bytes = sound[..sound.len() - 28].to_vec();
        for word in [u32::from_le_bytes(*b"BLK1"), noise.len() as u32, crc32fast::hash(&noise)] {
            bytes.extend_from_slice(&word.to_le_bytes());
        }
        bytes.extend_from_slice(&noise);
        prop_assert!(read(&bytes, chunk).is_err(), "the closing block is missing");
    }
}

#[test]
fn a_decoded_token_takes_its_packed_bits() {
    // 1 + 54 bits, 1 + 20 bits, 1 + 1 bit, token 1 + 1 + 2 bytes; blocks add 12 bytes in 64 KiB.
    let bytes = write(&decode(1000)).len() - write(&decode(0)).len();
    assert!((16..=19).contains(&(bytes / 1000)), "{bytes}");
}

#[test]
fn a_cut_trace_gives_its_whole_blocks_and_says_so() {
    let events = decode(12_000);
    let bytes = write(&events);
    assert!(bytes.len() > 3 * 65_536, "the trace must have several blocks");
    for keep in [bytes.len() - 1, bytes.len() - 28, 100_000, 200, 50, 3] {
        let (mut reader, mut routes) = (TraceReader::new(), 0);
        reader.feed(&bytes[..keep]);
        while let Some(event) = reader.next().expect("nothing is damaged") {
            routes += u64::from(matches!(event, Event::Route { .. }));
        }
        assert_eq!(reader.routes(), routes);
        assert!(keep < 100_000 || routes > 5_000, "{keep}: {routes}");
        assert_eq!(reader.finish(), Err(TraceError::Truncated { offset: keep as u64 }));
    }
}

#[test]
fn each_lie_has_its_error() {
    let sound = write(&decode(3));
    let told = |bytes: &[u8]| read(bytes, 1 << 20).expect_err("damaged");
    let with = |at: usize, value: u8| {
        let mut bytes = sound.clone();
        bytes[at] = value;
        told(&bytes)
    };
    assert_eq!(with(0, b'X'), TraceError::NotATrace);
    assert_eq!(with(8, 2), TraceError::Version { found: 2 });
    assert_eq!(with(11, 0xFF), TraceError::BadHeader { what: "more than 4096 layers" });
    assert_eq!(with(20, 0), TraceError::Checksum { offset: 0 });
    let block = 44 + 3 * 16 + 4;
    assert_eq!(with(block, b'?'), TraceError::BadBlock { offset: block as u64, what: "unknown kind of block" });
    assert_eq!(with(block + 7, 1), TraceError::BadBlock { offset: block as u64, what: "impossible block length" });
    assert_eq!(with(block + 12, 9), TraceError::Checksum { offset: block as u64 });
    assert_eq!(told(&[]), TraceError::Empty);
    let joined = [sound.clone(), sound.clone()].concat();
    assert_eq!(told(&joined), TraceError::Trailing { offset: sound.len() as u64 });
    // A block left out: every checksum is right, the totals are not.
    let short = [&sound[..block], &sound[sound.len() - 28..]].concat();
    assert_eq!(told(&short), TraceError::BadBlock { offset: block as u64, what: "a block is missing" });
}

#[test]
fn headers_and_routes_of_other_models_are_refused() {
    assert_eq!(header().check_model(&[7; 32]), Ok(()));
    let error = header().check_model(&[8; 32]).expect_err("another model");
    assert_eq!(error, TraceError::OtherModel { found: 0x0707_0707_0707_0707, expected: 0x0808_0808_0808_0808 });
    for spoil in [
        (|h: &mut TraceHeader| h.layers.clear()) as fn(&mut TraceHeader),
        |h| h.layers.swap(0, 1),
        |h| h.layers[1].layer = LayerIdx(1),
        |h| h.layers[0].top_k = 0,
        |h| h.layers[2].top_k = 2,
    ] {
        let mut bad = header();
        spoil(&mut bad);
        assert!(matches!(TraceWriter::new(&bad), Err(TraceError::BadHeader { .. })), "{bad:?}");
    }
    let mut writer = TraceWriter::new(&header()).expect("a sound header");
    for (layer, expert) in [(0, 0), (3, 0), (9, 0), (2, 24)] {
        let layer = LayerIdx(layer);
        assert_eq!(writer.route(layer, &[ExpertIdx(expert)]), Err(TraceError::BadRoute { layer, experts: 1 }));
    }
    let classes = header().size_classes();
    assert_eq!(classes.iter().map(|c| (c.0.0, c.1.len())).collect::<Vec<_>>(), [(24_576, 1), (16_384, 1), (4096, 1)]);
}
