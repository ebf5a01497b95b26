//! When to stop generating: stop tokens, and stop strings that may span tokens. Owns the text that is withheld while it
//! could still become a stop string; never lets a part of one out. Surprising fact: the first stop string to be complete wins, not
//! the one that began first, so the outcome does not depend on how text is cut into tokens.

use thiserror::Error;

use crate::units::TokenId;

/// Stop strings that mean nothing.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum StopError {
    #[error("stop string {index} is empty, which would stop before any text; leave it out")]
    Empty { index: usize },
}

/// The text that is certain after a step, and whether generation is over.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StopStep {
    /// Text to show; never a part of a stop string.
    pub text: String,
    /// The stop string that was completed: its place in the list given to [`StopRules::new`].
    pub stopped_by: Option<usize>,
}

/// Watches one answer.
#[derive(Clone, Debug)]
pub struct StopRules {
    tokens: Vec<TokenId>,
    strings: Vec<String>,
    /// The end of the text so far that begins a stop string.
    withheld: String,
}

impl StopRules {
    /// Rules for an answer; both lists may be empty.
    ///
    /// # Errors
    /// [`StopError::Empty`].
    pub fn new(tokens: Vec<TokenId>, strings: Vec<String>) -> Result<StopRules, StopError> {
        match strings.iter().position(String::is_empty) {
            Some(index) => Err(StopError::Empty { index }),
            None => Ok(StopRules { tokens, strings, withheld: String::new() }),
        }
    }

    /// Whether generation ends with this token, which is then not shown.
    pub fn is_stop_token(&self, id: TokenId) -> bool {
        self.tokens.contains(&id)
    }

    /// Takes the text of one more token. After a stop nothing more is to be pushed.
    pub fn push(&mut self, text: &str) -> StopStep {
        self.withheld.push_str(text);
        let ends = self.strings.iter().enumerate().filter_map(|(index, stop)| {
            let start = self.withheld.find(stop.as_str())?;
            Some((start + stop.len(), start, index))
        });
        if let Some((_, start, index)) = ends.min() {
            self.withheld.truncate(start);
            return StopStep { text: std::mem::take(&mut self.withheld), stopped_by: Some(index) };
        }
        let rest = self.withheld.split_off(self.certain_bytes());
        StopStep { text: std::mem::replace(&mut self.withheld, rest), stopped_by: None }
    }

    /// The answer ended otherwise: what was withheld is ordinary text.
    pub fn finish(&mut self) -> String {
        std::mem::take(&mut self.withheld)
    }

    /// Bytes before the longest end of the text that begins a stop string.
    fn certain_bytes(&self) -> usize {
        let text = self.withheld.as_str();
        let longest = self.strings.iter().map(String::len).max().unwrap_or(0);
        let earliest = text.len().saturating_sub(longest);
        let begins_stop = |at: &usize| self.strings.iter().any(|stop| stop.starts_with(&text[*at..]));
        (earliest..text.len()).filter(|at| text.is_char_boundary(*at)).find(begins_stop).unwrap_or(text.len())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn rules(strings: &[&str]) -> StopRules {
        StopRules::new(vec![1, 7], strings.iter().map(|stop| (*stop).to_owned()).collect()).unwrap()
    }

    /// Pushes the pieces and returns what was shown and what stopped.
    fn run(strings: &[&str], pieces: &[&str]) -> (String, Option<usize>) {
        let mut rules = rules(strings);
        let mut shown = String::new();
        for piece in pieces {
            let step = rules.push(piece);
            shown += &step.text;
            if step.stopped_by.is_some() {
                return (shown, step.stopped_by);
            }
        }
        (shown + &rules.finish(), None)
    }

    fn check(strings: &[&str], pieces: &[&str], shown: &str, stopped_by: Option<usize>) {
        assert_eq!(run(strings, pieces), (shown.to_owned(), stopped_by), "{strings:?} {pieces:?}");
    }

    #[test]
    fn strings_across_tokens() {
        check(&["END"], &["a E", "N", "D b"], "a ", Some(0));
        check(&["END"], &["a E", "N", "X"], "a ENX", None);
        check(&["END"], &["a EN"], "a EN", None);
        check(&["\n\n"], &["a\n", "b\n", "\nc"], "a\nb", Some(0));
        check(&["aab"], &["a", "a", "a", "b"], "a", Some(0));
        check(&[], &["a"], "a", None);
        check(&["\u{4f60}\u{597d}"], &["x\u{4f60}", "\u{597d}"], "x", Some(0));
    }

    #[test]
    fn the_first_complete_string_wins() {
        check(&["abcd", "bc"], &["abcd"], "a", Some(1));
        check(&["abcd", "bc"], &["ab", "cd"], "a", Some(1));
        check(&["bc", "abc"], &["xabc"], "x", Some(1));
    }

    #[test]
    fn text_is_shown_as_soon_as_it_is_certain() {
        let mut rules = rules(&["END"]);
        assert_eq!(rules.push("see E").text, "see ");
        assert_eq!(rules.push("lse").text, "Else");
        assert!(rules.is_stop_token(7) && !rules.is_stop_token(8));
        assert_eq!(StopRules::new(vec![], vec!["a".into(), String::new()]).unwrap_err(), StopError::Empty { index: 1 });
    }

    proptest! {
        #[test]
        fn cutting_does_not_matter(
            text in "[ab\u{e9}]{0,20}",
            strings in prop::collection::vec("[ab\u{e9}]{1,4}", 0..4),
            cuts in prop::collection::vec(0usize..20, 0..6),
        ) {
            let strings: Vec<&str> = strings.iter().map(String::as_str).collect();
            // Plainly: the shortest beginning of the text that ends with a stop string, the longest such string.
            let ends = (0..=text.len()).filter(|end| text.is_char_boundary(*end));
            let first = ends.filter_map(|end| {
                let stops = strings.iter().enumerate().filter(|(_, stop)| text[..end].ends_with(**stop));
                stops.map(|(index, stop)| (end, end - stop.len(), index)).min()
            }).next();
            let expected = match first {
                Some((_, start, index)) => (text[..start].to_owned(), Some(index)),
                None => (text.clone(), None),
            };
            let mut places: Vec<usize> = cuts.into_iter().filter(|at| *at <= text.len() && text.is_char_boundary(*at)).collect();
            places.extend([0, text.len()]);
            places.sort_unstable();
            let pieces: Vec<&str> = places.windows(2).map(|pair| &text[pair[0]..pair[1]]).collect();
            prop_assert_eq!(run(&strings, &pieces), expected);
        }
    }
}
