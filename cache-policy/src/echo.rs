//! Recognises that routes repeat an earlier stretch and says when each expert comes next. Owns a bounded history.
//! Never trusts a repetition before it has held for some tokens, and drops it when the routes disagree.
//! Surprising fact: no token ids are needed; the experts of a token's first layer identify the token well enough.

use alloc::vec::Vec;

use crate::ids::ExpertKey;
use crate::key_table::KeyTable;
use crate::mix::mix;

/// Uses remembered (8 bytes each): 4,369 tokens of 240 uses.
const USES_MAX: u64 = 1 << 20;
/// Tokens remembered at most.
const TOKENS_MAX: u64 = 1 << 14;
/// How far ahead a repetition is read, in tokens.
const AHEAD_TOKENS: u64 = 1024;
/// Agreeing tokens needed before a repetition counts. Shorter runs are chance: on new text a match of three tokens is
/// followed by 0.8 more.
const TRUST_MIN: u32 = 8;
const TRUST_MAX: u32 = 32;
/// Trust that a disagreeing token costs.
const DOUBT: u32 = 4;
/// Trust of a fresh match of three first-layer routes.
const TRUST_OF_MATCH: u32 = 3;
const NEVER: u32 = u32::MAX;

#[derive(Clone, Copy, Debug)]
struct Use {
    key: ExpertKey,
    /// Low bits of the token that uses the key next; `NEVER` until then.
    next: u32,
}

/// When a key comes next, valid within one stretch of trust.
#[derive(Clone, Copy, Debug)]
struct Due {
    stretch: u32,
    token: u64,
}

/// History of routes and the place in it that the present repeats.
pub(crate) struct Echo {
    /// Ring of uses, token after token; grows to `USES_MAX`.
    uses: Vec<Use>,
    uses_total: u64,
    /// Ring: number of the first use of each token.
    starts: Vec<u64>,
    /// Closed tokens; also the serial of the running one.
    tokens: u64,
    running: Vec<ExpertKey>,
    last_use: KeyTable<u64>,
    /// First-layer signatures of the last three tokens, newest first.
    signatures: [u64; 3],
    /// Direct-mapped: hash of three signatures and the last token that ended them.
    index: Vec<(u64, u64)>,
    /// Past token that the last closed one repeats.
    aligned: Option<u64>,
    trust: u32,
    stretch: u32,
    is_active: bool,
    due: KeyTable<Due>,
    seen_in: KeyTable<u64>,
}

impl Echo {
    pub(crate) fn new() -> Self {
        Self {
            uses: Vec::new(),
            uses_total: 0,
            starts: alloc::vec![0; TOKENS_MAX as usize + 1],
            tokens: 0,
            running: Vec::new(),
            last_use: KeyTable::new(u64::MAX),
            signatures: [0; 3],
            index: alloc::vec![(0, u64::MAX); TOKENS_MAX as usize],
            aligned: None,
            trust: 0,
            stretch: 0,
            is_active: false,
            due: KeyTable::new(Due { stretch: 0, token: 0 }),
            seen_in: KeyTable::new(u64::MAX),
        }
    }

    /// Whether anything is expected of any key.
    #[inline]
    pub(crate) fn is_active(&self) -> bool {
        self.is_active
    }

    /// Records a use by the running token.
    #[inline]
    pub(crate) fn record(&mut self, key: ExpertKey) {
        self.running.push(key);
    }

    /// Tokens until the next expected use (0 = the running token); `None` when nothing is expected of the key.
    #[inline]
    pub(crate) fn wait_tokens(&self, key: ExpertKey) -> Option<u64> {
        if !self.is_active {
            return None;
        }
        let due = self.due.get(key);
        (due.stretch == self.stretch).then(|| due.token.checked_sub(self.tokens)).flatten()
    }

    /// Ends the running token.
    pub(crate) fn close_token(&mut self) {
        if self.running.is_empty() {
            return;
        }
        let signature = self.signature();
        self.signatures = [signature, self.signatures[0], self.signatures[1]];
        let context = self.signatures.iter().fold(0, |h, &s| mix(h ^ s));
        self.follow();
        let slot = (context % self.index.len() as u64) as usize;
        if self.trust < TRUST_MIN {
            self.find(slot, context);
        }
        self.index[slot] = (context, self.tokens);
        self.append();
        self.expect();
    }

    /// Order-free hash of the first layer's experts.
    fn signature(&self) -> u64 {
        let first = self.running[0].layer;
        let experts = self.running.iter().filter(|k| k.layer == first);
        experts.fold(0u64, |sum, k| sum.wrapping_add(mix(u64::from(k.expert.0) + 1)))
    }

    /// Whether a past token's uses are all still remembered.
    fn is_kept(&self, token: u64) -> bool {
        token < self.tokens
            && self.tokens - token < TOKENS_MAX
            && self.uses_total - self.starts[(token % TOKENS_MAX) as usize] <= USES_MAX
    }

    /// Numbers of the uses of a kept token.
    fn span(&self, token: u64) -> core::ops::Range<u64> {
        let end =
            if token + 1 == self.tokens { self.uses_total } else { self.starts[((token + 1) % TOKENS_MAX) as usize] };
        self.starts[(token % TOKENS_MAX) as usize]..end
    }

    fn use_at(&self, number: u64) -> Use {
        self.uses[(number % USES_MAX) as usize]
    }

    /// Compares the running token with the one after the aligned one.
    fn follow(&mut self) {
        let Some(next) = self.aligned.map(|a| a + 1).filter(|&n| self.is_kept(n)) else {
            (self.aligned, self.trust) = (None, 0);
            return;
        };
        for &key in &self.running {
            *self.seen_in.at(key) = self.tokens;
        }
        let span = self.span(next);
        let expected = span.end - span.start;
        let shared = span.filter(|&n| self.seen_in.get(self.use_at(n).key) == self.tokens).count() as u64;
        let agrees = 2 * shared >= expected.max(self.running.len() as u64);
        self.trust = if agrees { (self.trust + 1).min(TRUST_MAX) } else { self.trust.saturating_sub(DOUBT) };
        self.aligned = (self.trust > 0).then_some(next);
    }

    /// Looks for the last time that the same three first-layer routes were seen.
    fn find(&mut self, slot: usize, context: u64) {
        let (hash, token) = self.index[slot];
        if self.aligned.is_none() && hash == context && self.is_kept(token) {
            (self.aligned, self.trust) = (Some(token), TRUST_OF_MATCH);
        }
    }

    /// Moves the running token into the history.
    fn append(&mut self) {
        self.starts[(self.tokens % TOKENS_MAX) as usize] = self.uses_total;
        for i in 0..self.running.len() {
            let key = self.running[i];
            let last = self.last_use.at(key);
            let before = core::mem::replace(last, self.uses_total);
            if before != u64::MAX && self.uses_total - before < USES_MAX {
                self.uses[(before % USES_MAX) as usize].next = self.tokens as u32;
            }
            let fresh = Use { key, next: NEVER };
            let at = (self.uses_total % USES_MAX) as usize;
            if at == self.uses.len() {
                self.uses.push(fresh);
            } else {
                self.uses[at] = fresh;
            }
            self.uses_total += 1;
        }
        self.running.clear();
        self.tokens += 1;
    }

    /// Brings the expectations up to the token that now begins.
    fn expect(&mut self) {
        let was_active = self.is_active;
        let trusted = self.aligned.filter(|&a| self.trust >= TRUST_MIN && self.is_kept(a));
        self.is_active = trusted.is_some();
        let Some(aligned) = trusted else { return };
        let horizon = aligned + AHEAD_TOKENS;
        if !was_active {
            self.stretch = self.stretch.wrapping_add(1);
            // Backward, so that the earliest use is what remains.
            for past in (aligned + 1..self.tokens.min(horizon + 1)).rev() {
                for n in self.span(past) {
                    self.set_due(self.use_at(n).key, past - aligned);
                }
            }
            return;
        }
        for n in self.span(aligned) {
            let Use { key, next } = self.use_at(n);
            // Serials are compared by their low bits: a use 2^32 tokens away is long forgotten.
            let wait = u64::from(next.wrapping_sub(aligned as u32));
            if next != NEVER && wait <= AHEAD_TOKENS {
                self.set_due(key, wait);
            }
        }
        if horizon < self.tokens {
            for n in self.span(horizon) {
                let key = self.use_at(n).key;
                if self.wait_tokens(key).is_none() {
                    self.set_due(key, AHEAD_TOKENS);
                }
            }
        }
    }

    /// `wait` counts from the last closed token.
    fn set_due(&mut self, key: ExpertKey, wait: u64) {
        *self.due.at(key) = Due { stretch: self.stretch, token: self.tokens - 1 + wait };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn feed(echo: &mut Echo, token: u16) {
        for layer in 0..3 {
            echo.record(ExpertKey::new(layer, (token * 7 + layer) % 61));
            echo.record(ExpertKey::new(layer, 100 + token));
        }
        echo.close_token();
    }

    /// Tokens 0..40 twice: halfway through the second pass every later expert is due exactly where it was.
    #[test]
    fn a_repetition_tells_the_future() {
        let mut echo = Echo::new();
        for token in (0..40).chain(0..20) {
            feed(&mut echo, token);
        }
        for token in 20..40u16 {
            assert_eq!(echo.wait_tokens(ExpertKey::new(2, 100 + token)), Some(u64::from(token) - 20), "{token}");
        }
        // Used in both passes: the next use lies after this pass began again, 20 tokens and more away.
        assert_eq!(echo.wait_tokens(ExpertKey::new(2, 105)), Some(25));
    }

    #[test]
    fn new_routes_expect_nothing_and_end_an_expectation() {
        let mut echo = Echo::new();
        for token in 0..60 {
            feed(&mut echo, token);
            assert!(!echo.is_active);
        }
        for token in 0..20 {
            feed(&mut echo, token);
        }
        assert!(echo.is_active);
        for token in 200..206 {
            feed(&mut echo, token);
        }
        assert!(!echo.is_active);
        assert_eq!(echo.wait_tokens(ExpertKey::new(0, 130)), None);
    }

    /// The incremental expectation equals a scan of the whole remembered repetition at every token.
    #[test]
    fn expectation_equals_a_scan() {
        let text: Vec<u16> = (0..300u32).map(|i| (i * i % 97) as u16).collect();
        let mut echo = Echo::new();
        let mut past: Vec<u16> = Vec::new();
        let mut checked = 0;
        for &token in text.iter().chain(&text).chain(&text) {
            feed(&mut echo, token);
            past.push(token);
            let Some(aligned) = echo.aligned.filter(|_| echo.is_active) else { continue };
            for probe in 0..97u16 {
                let found = past[aligned as usize + 1..].iter().position(|&t| t == probe);
                let wait = echo.wait_tokens(ExpertKey::new(0, 100 + probe));
                assert_eq!(wait, found.map(|f| f as u64), "token {} probe {probe}", past.len());
                checked += 1;
            }
        }
        assert!(checked > 10_000, "the repetition was recognised for {checked} probes only");
    }
}
