//! Runs policies at budgets, and the optimum, over one reading of a trace. Owns the replays; never prints.
//! Surprising fact: the optimum needs the whole trace in memory (8 bytes a use) while policies stream, so a very long
//! trace has no optimum unless it is asked for.

use cache_policy::plan::Facts;
use cache_policy::policies::{DEFAULT, KNOWN, MakePolicy};
use cache_policy::{Bytes, Census, LayerIdx, Phase, Recording, Request, Score, ScoredReplay, by_name};
use rayon::prelude::*;

use super::budgets::Budget;
use super::note;
use super::trace_input::TraceInput;
use crate::cli::CliError;
use crate::sys;

/// Uses up to which the optimum is computed without being asked for: half a GiB.
const OPTIMUM_USES_AUTO: usize = 1 << 26;
/// Memory of the optimum: the recording and the next use of every use, and what the recording needs while it grows.
const OPTIMUM_USE_BYTES: u64 = 12;

/// Whether the optimum is wanted.
#[derive(clap::ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
pub enum WantOptimum {
    /// Unless the trace is very long
    Auto,
    /// Whatever it takes
    Always,
    /// No
    Never,
}

/// A policy under test.
#[derive(Clone, Copy)]
pub struct Contender {
    pub name: &'static str,
    make: MakePolicy,
}

/// The policies of a list; `all` is all of them.
///
/// # Errors
/// The first unknown name, with the known ones.
pub fn contenders(list: &[String]) -> Result<Vec<Contender>, CliError> {
    let mut found: Vec<Contender> = Vec::new();
    for name in list.iter().map(|name| name.trim()) {
        if name == "all" {
            return Ok(KNOWN.iter().map(|&(name, make)| Contender { name, make }).collect());
        }
        by_name(name).map_err(|e| CliError::usage(format!("--policy: {e}, all")))?;
        let name = if name == "auto" { DEFAULT } else { name };
        let &(name, make) = KNOWN.iter().find(|(known, _)| *known == name).expect("its name was found");
        if found.iter().all(|c| c.name != name) {
            found.push(Contender { name, make });
        }
    }
    Ok(found)
}

/// One policy at one budget.
pub struct Scored {
    pub policy: &'static str,
    /// Index of the budget.
    pub budget: usize,
    pub score: Score,
    /// Requests that had to be cut into waves.
    pub split_requests: u64,
}

/// Everything that one reading of a trace gave.
pub struct Scores {
    pub census: Census,
    /// By budget, then by policy, in the order asked for.
    pub scored: Vec<Scored>,
    /// The optimum of every budget, when it was computed.
    pub optimum: Option<Vec<Score>>,
}

impl Scores {
    /// What `policy` did at budget number `budget`.
    pub fn of(&self, budget: usize, policy: &str) -> Option<&Scored> {
        self.scored.iter().find(|s| s.budget == budget && s.policy == policy)
    }
}

/// The requests of a trace in memory, with their phases; `None` once they are too many.
struct Keeping {
    recording: Option<Recording>,
    /// First request of each stretch of one phase.
    phases: Vec<(u64, Phase)>,
    uses_max: usize,
}

impl Keeping {
    fn new(input: &TraceInput, want: WantOptimum) -> Result<Self, CliError> {
        let layers: Vec<(LayerIdx, u16)> = input.header().layers.iter().map(|l| (l.layer, l.experts)).collect();
        let uses_max = match want {
            WantOptimum::Never => 0,
            WantOptimum::Auto => OPTIMUM_USES_AUTO,
            WantOptimum::Always => {
                let usable = sys::memory_facts().as_ref().map(Facts::usable).map_err(CliError::failed)?;
                usize::try_from(usable.0 / OPTIMUM_USE_BYTES).unwrap_or(usize::MAX).min(Recording::USES_MAX)
            }
        };
        let recording = (want != WantOptimum::Never).then(|| Recording::new(&layers));
        Ok(Self { recording, phases: Vec::new(), uses_max })
    }

    fn push(&mut self, &Request { phase, layer, experts, is_favour, .. }: &Request<'_>) -> Result<(), CliError> {
        let Some(recording) = self.recording.as_mut().filter(|_| !is_favour) else { return Ok(()) };
        if recording.uses() + experts.len() > self.uses_max {
            self.recording = None;
            return Ok(());
        }
        if self.phases.last().is_none_or(|last| last.1 != phase) {
            self.phases.push((recording.requests(), phase));
        }
        recording.push(layer, experts).map_err(CliError::failed)
    }

    fn optimum(&self, budget: &Budget, census: &Census) -> Option<Score> {
        let recording = self.recording.as_ref()?;
        let (mut score, mut request, mut stretch) = (Score::default(), 0, 0);
        recording.optimum_by_request(&budget.shapes, &mut |layer, served| {
            while self.phases.get(stretch + 1).is_some_and(|next| next.0 <= request) {
                stretch += 1;
            }
            score.add(self.phases[stretch].1, served, census.expert_bytes(layer));
            request += 1;
        });
        Some(score)
    }
}

/// Replays `input` to its end.
///
/// # Errors
/// Whatever is wrong with the trace; an optimum that was insisted on and does not fit into memory.
pub fn score(
    input: &mut TraceInput,
    budgets: &[Budget],
    contenders: &[Contender],
    want: WantOptimum,
) -> Result<Scores, CliError> {
    let mut keeping = Keeping::new(input, want)?;
    let mut jobs: Vec<(Scored, ScoredReplay)> = Vec::new();
    for (budget, Budget { shapes, .. }) in budgets.iter().enumerate() {
        for contender in contenders {
            let scored = Scored { policy: contender.name, budget, score: Score::default(), split_requests: 0 };
            jobs.push((scored, ScoredReplay::new(shapes, contender.make)));
        }
    }
    while let Some(batch) = input.next_batch()? {
        let outcome =
            jobs.par_iter_mut().try_for_each(|(_, replay)| batch.requests().try_for_each(|r| replay.request(&r)));
        outcome.map_err(CliError::failed)?;
        batch.requests().try_for_each(|r| keeping.push(&r))?;
    }
    let census = input.census().clone();
    let shown = input.path().display();
    if census.preloaded > 0 {
        note(&format!(
            "note: the recorded run had {} experts preloaded; replays start empty, so that budgets can be compared",
            census.preloaded
        ));
    }
    if census.uses_total() == 0 {
        return Err(CliError::failed(format!("{shown} has no routes; record a run that computes tokens")));
    }
    if keeping.recording.is_none() && want != WantOptimum::Never {
        let bytes = Bytes(census.uses_total() * OPTIMUM_USE_BYTES);
        let what = format!("the optimum of {} uses takes {bytes} of memory", census.uses_total());
        match want {
            WantOptimum::Always => {
                return Err(CliError::failed(format!("{what}, which is not free here; --optimum never")));
            }
            _ => note(&format!("note: {what} and is left out; --optimum always computes it")),
        }
    }
    // One at a time: each holds the next use of every use.
    let optimum = budgets.iter().map(|budget| keeping.optimum(budget, &census)).collect();
    let scored = jobs.into_iter().map(|(mut scored, replay)| {
        (scored.score, scored.split_requests) = (replay.score, replay.split_requests);
        scored
    });
    Ok(Scores { census, scored: scored.collect(), optimum })
}
