//! Turns a routing archive (numpy npz) into a trace file and reads it back to prove it. Never touches the archive.
//! Surprising fact: prompts are written token by token like the rest; the archive does not say how they were batched.
//!
//! `cargo run --release -p cache-policy --example npz_to_trace -- IN.npz OUT.routes [EXPERT_BYTES]`

#[path = "routes_npz/mod.rs"]
#[allow(dead_code, reason = "each example uses its part")]
mod routes_npz;

use std::error::Error;
use std::fs::File;
use std::io::{Read, Write};
use std::path::Path;
use std::time::Instant;

use cache_policy::{Bytes, Event, LayerIdx, Phase, TraceHeader, TraceLayer, TraceReader, TraceWriter};
use routes_npz::Routes;

fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [input, output, rest @ ..] = args.as_slice() else {
        return Err("usage: npz_to_trace IN.npz OUT.routes [EXPERT_BYTES]".into());
    };
    let expert_bytes = Bytes(rest.first().map_or(Ok(1), |b| b.parse())?);
    let routes = Routes::read(Path::new(input))?;
    write(&routes, expert_bytes, Path::new(output))?;
    check(&routes, Path::new(output))
}

fn write(routes: &Routes, expert_bytes: Bytes, output: &Path) -> Result<(), Box<dyn Error>> {
    let top_k = u16::try_from(routes.top_k)?;
    let layer = |l| TraceLayer { layer: LayerIdx(l), experts: routes.experts, top_k, expert_bytes };
    // The archive has no model file: an identity of zeros says so.
    let header = TraceHeader { model: [0; 32], layers: (0..routes.layers as u16).map(layer).collect() };
    let mut writer = TraceWriter::new(&header)?;
    let mut file = File::create(output)?;
    let mut outcome = Ok(());
    let mut sink = |bytes: &[u8]| {
        if outcome.is_ok() {
            outcome = file.write_all(bytes);
        }
    };
    let begin = Instant::now();
    for token in 0..routes.sessions * routes.tokens {
        let (session, position) = (token / routes.tokens, token % routes.tokens);
        if position == 0 {
            writer.session(session as u32);
            writer.phase(Phase::Prefill);
        }
        if position == routes.prefill[session] {
            writer.phase(Phase::Decode);
        }
        let (experts, id) = routes.token(token);
        writer.token(position as u32, id);
        for (l, ids) in experts.chunks_exact(routes.top_k).enumerate() {
            writer.route(LayerIdx(l as u16), ids)?;
        }
        writer.drain(&mut sink);
    }
    writer.finish(&mut sink);
    outcome?;
    let tokens = (routes.sessions * routes.tokens) as f64;
    let bytes = std::fs::metadata(output)?.len() as f64;
    let ns = begin.elapsed().as_nanos() as f64;
    println!("{}: {:.1} bytes and {:.0} ns a token written", output.display(), bytes / tokens, ns / tokens);
    Ok(())
}

fn check(routes: &Routes, path: &Path) -> Result<(), Box<dyn Error>> {
    let (mut reader, mut file, mut chunk) = (TraceReader::new(), File::open(path)?, vec![0; 1 << 16]);
    let mut expected = routes.requests(0..routes.sessions * routes.tokens);
    loop {
        let read = file.read(&mut chunk)?;
        if read == 0 {
            break;
        }
        reader.feed(&chunk[..read]);
        while let Some(event) = reader.next()? {
            if let Event::Route { layer, experts } = event
                && expected.next() != Some((layer, experts))
            {
                return Err("the trace differs from the archive".into());
            }
        }
    }
    println!("{}: {} routes, {} uses, equal to the archive", path.display(), reader.routes(), reader.uses());
    reader.finish()?;
    if expected.next().is_some() { Err("the trace is short".into()) } else { Ok(()) }
}
