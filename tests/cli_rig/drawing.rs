//! The file of `--trace-file` as its readers see it: rows of stretches.
//! Never forgives: an event that no viewer would draw ends the test. Surprising fact: overlapping stretches of a row lie in lanes, which are
//! joined here.

use std::collections::HashMap;
use std::path::Path;

use serde_json::Value;

use super::json;

/// Something that took a while.
#[derive(Clone, Debug)]
pub struct Drawn {
    pub what: String,
    /// Lane of its row, from 1.
    pub lane: usize,
    /// Microseconds since the run began.
    pub at: f64,
    pub took: f64,
    pub args: Value,
}

/// By row, in order of time.
pub fn drawn(path: &Path) -> HashMap<String, Vec<Drawn>> {
    let file = json(path);
    let events = file["traceEvents"].as_array().unwrap();
    let (mut tracks, mut rows) = (HashMap::new(), HashMap::<String, Vec<Drawn>>::new());
    for event in events {
        assert_eq!(event["pid"], 1, "{event}");
        let (name, kind) = (event["name"].as_str().unwrap(), event["ph"].as_str().unwrap());
        match kind {
            "M" if name == "thread_name" => {
                let full = event["args"]["name"].as_str().unwrap();
                let (row, lane) = full.split_once(' ').map_or((full, 1), |(row, lane)| (row, lane.parse().unwrap()));
                assert!(tracks.insert(event["tid"].as_u64().unwrap(), (row.to_owned(), lane)).is_none(), "{event}");
            }
            "M" => assert!(["process_name", "thread_sort_index"].contains(&name), "{event}"),
            "X" => {
                // A track is named before it is used.
                let (row, lane) = tracks[&event["tid"].as_u64().unwrap()].clone();
                let (at, took) = (event["ts"].as_f64().unwrap(), event["dur"].as_f64().unwrap());
                assert!(at >= 0.0 && took >= 0.0 && !name.is_empty(), "{event}");
                rows.entry(row).or_default().push(Drawn {
                    what: name.into(),
                    lane,
                    at,
                    took,
                    args: event["args"].clone(),
                });
            }
            _ => panic!("{event}"),
        }
    }
    for (row, stretches) in &mut rows {
        stretches.sort_by(|a, b| a.at.total_cmp(&b.at));
        let mut ends = HashMap::new();
        for s in stretches {
            let end = ends.insert(s.lane, s.at + s.took).unwrap_or(0.0);
            // Neighbours may overlap by what sums are rounded to.
            assert!(end <= s.at + 1e-3, "{row}: {s:?} begins before {end}");
        }
    }
    rows
}
