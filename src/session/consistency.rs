//! Whether computing tokens one by one gives the bits that computing them together gives.
//! Never tolerates a difference. Surprising fact: this is the promise that makes chunk sizes and session reuse invisible, so a user
//! can check it on any file and machine.

use crate::models::Want;
use crate::session::timeline::{Flow, SessionError, StopAsked, Timeline, Watcher};
use crate::units::TokenId;

/// Outcome of a comparison.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Consistency {
    /// Positions compared.
    pub positions: usize,
    /// Positions with at least one different bit.
    pub different: usize,
    /// Largest absolute difference of a logit.
    pub max_abs: f32,
    /// First position that differs.
    pub first: Option<usize>,
}

struct Rows<'a> {
    rows: Vec<(usize, Vec<f32>)>,
    is_asked: &'a StopAsked,
}

impl Watcher for Rows<'_> {
    fn prefill(&mut self, _done: usize, _total: usize) -> Flow {
        if (self.is_asked)() { Flow::Stop } else { Flow::Continue }
    }

    fn stop_asked(&self) -> Option<StopAsked> {
        Some(StopAsked::clone(self.is_asked))
    }

    fn logits(&mut self, position: usize, logits: &[f32]) {
        self.rows.push((position, logits.to_vec()));
    }
}

/// Computes `tokens` in chunks, then again with the last `single` of them one by one, and compares the logits of those.
///
/// `is_asked` says whether to stop, between passes and during them.
///
/// # Errors
/// A failed pass, a prompt that does not fit, an interruption.
pub fn compare(
    timeline: &mut Timeline,
    tokens: &[TokenId],
    single: usize,
    is_asked: &StopAsked,
) -> Result<Consistency, SessionError> {
    let single = single.min(tokens.len());
    let split = tokens.len() - single;
    let rows = || Rows { rows: Vec::new(), is_asked };
    let mut together = rows();
    timeline.sync(tokens, Want::All, &mut together)?;
    timeline.clear();
    let mut apart = rows();
    if split > 0 {
        timeline.sync(&tokens[..split], Want::None, &mut rows())?;
    }
    for token in &tokens[split..] {
        if is_asked() {
            return Err(SessionError::Interrupted);
        }
        timeline.append(&[*token], Want::All, &mut apart)?;
    }
    let mut outcome = Consistency { positions: single, ..Consistency::default() };
    for ((at, a), (_, b)) in together.rows.iter().skip(split).zip(&apart.rows) {
        let is_equal = a.iter().zip(b).all(|(x, y)| x.to_bits() == y.to_bits());
        if !is_equal {
            outcome.different += 1;
            outcome.first.get_or_insert(*at);
            let worst = a.iter().zip(b).map(|(x, y)| (x - y).abs()).fold(0.0f32, f32::max);
            outcome.max_abs = outcome.max_abs.max(worst);
        }
    }
    Ok(outcome)
}
