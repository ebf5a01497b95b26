//! Cuts plain text into the words that byte-pair merging works on. Owns the splitting rules by name; never sees a vocabulary.
//! Surprising fact: the published rules use one look-ahead (white space keeps its last character for the next word). It is done
//! here in code, so that the expressions run in linear time on any text; a backtracking engine gives up on long runs of spaces.

use regex::Regex;

/// White space not followed by a word, then any white space: `\s+(?!\S)|\s+` without the look-ahead, see [`Rule::keeps_last_space`].
macro_rules! with_trailing_space {
    ($pattern:expr) => {
        concat!($pattern, r"|\s*[\r\n]+|\s+")
    };
}

/// One splitting step: matches and the gaps between them both become pieces.
struct Rule {
    pattern: Regex,
    /// A match of white space that stops before a word leaves its last character to that word.
    keeps_last_space: bool,
}

/// Pattern and [`Rule::keeps_last_space`] of each step.
type RuleSource = (&'static str, bool);

/// Digits in threes, CJK runs, then words; the steps are applied one after another (deepseek-v4.md section 7.1).
const DEEPSEEK_V3: &[RuleSource] = &[
    (r"\p{N}{1,3}", false),
    (r"[\x{4e00}-\x{9fa5}\x{3040}-\x{309f}\x{30a0}-\x{30ff}]+", false),
    (
        with_trailing_space!(concat!(
            r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"##,
            r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
        )),
        true,
    ),
];

/// Line ends, words, punctuation, CJK runs and single digits (tokenizer.json of the DeepSeek Coder models).
const DEEPSEEK_CODER: &[RuleSource] = &[
    (r"[\r\n]", false),
    (r"\s?\p{L}+", false),
    (r"\s?\p{P}+", false),
    (r"[\x{4e00}-\x{9fa5}\x{800}-\x{4e00}\x{ac00}-\x{d7ff}]+", false),
    (r"\p{N}", false),
];

/// English contractions, words, single digits (tokenizer.json of the Qwen2 models).
const QWEN2: &[RuleSource] = &[(
    with_trailing_space!(concat!(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}",
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
    )),
    true,
)];

/// As Qwen2, but combining marks belong to words (qwen38-flash-next.md section 7.1).
const QWEN35: &[RuleSource] = &[(
    with_trailing_space!(concat!(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}",
        r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    )),
    true,
)];

/// As Qwen2, but digits in threes (glm53-flash.md section 6.1).
const GLM4: &[RuleSource] = &[(
    with_trailing_space!(concat!(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}",
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
    )),
    true,
)];

/// The rules by the name that a file gives in `tokenizer.ggml.pre`.
const RULES: &[(&str, &[RuleSource])] = &[
    ("joyai-llm", DEEPSEEK_V3),
    ("deepseek-v3", DEEPSEEK_V3),
    ("deepseek-coder", DEEPSEEK_CODER),
    ("qwen2", QWEN2),
    ("qwen35", QWEN35),
    ("glm4", GLM4),
];

/// A named splitting rule, compiled.
pub struct PreTokenizer {
    rules: Vec<Rule>,
}

impl PreTokenizer {
    /// The rule called `name`, or `None` when there is no such rule.
    pub fn by_name(name: &str) -> Option<PreTokenizer> {
        let (_, sources) = RULES.iter().find(|(known, _)| *known == name)?;
        let rules = sources
            .iter()
            .map(|&(pattern, keeps_last_space)| Rule {
                pattern: Regex::new(pattern).expect("the patterns above compile, a test does so"),
                keeps_last_space,
            })
            .collect();
        Some(PreTokenizer { rules })
    }

    /// The names that [`PreTokenizer::by_name`] knows.
    pub fn names() -> impl Iterator<Item = &'static str> {
        RULES.iter().map(|(name, _)| *name)
    }

    /// Calls `word` for each piece of `text`, in order. The pieces are not empty and their concatenation is `text`.
    pub fn split<'t>(&self, text: &'t str, mut word: impl FnMut(&'t str)) {
        split_by(&self.rules, text, &mut word);
    }
}

fn split_by<'t>(rules: &[Rule], text: &'t str, word: &mut dyn FnMut(&'t str)) {
    let Some((rule, rest)) = rules.split_first() else {
        if !text.is_empty() {
            word(text);
        }
        return;
    };
    let mut done = 0;
    while let Some(found) = rule.pattern.find_at(text, done) {
        let mut end = found.end();
        if rule.keeps_last_space && end < text.len() {
            end -= space_left_to_next_word(found.as_str());
        }
        split_by(rest, &text[done..found.start()], word);
        split_by(rest, &text[found.start()..end], word);
        done = end;
    }
    split_by(rest, &text[done..], word);
}

/// Bytes of the last character of a white-space run of two or more characters, else 0.
///
/// The last character tells which alternative matched: every other one ends in a word, punctuation or line end.
fn space_left_to_next_word(matched: &str) -> usize {
    match matched.chars().next_back() {
        Some(last) if last.is_whitespace() && !matches!(last, '\r' | '\n') && matched.len() > last.len_utf8() => {
            last.len_utf8()
        }
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(rule: &str, text: &str, expected: &[&str]) {
        let mut words = Vec::new();
        PreTokenizer::by_name(rule).unwrap().split(text, |word| words.push(word));
        assert_eq!(words, expected, "{rule}: {text:?}");
    }

    #[test]
    fn every_rule_compiles_and_loses_nothing() {
        let text = "a  1\u{a0}\u{3000} \u{4f60}\u{597d} x\r\n \n\t y=12345;\n\n  don't \u{301}e\u{301}  ";
        for name in PreTokenizer::names() {
            let mut joined = String::new();
            PreTokenizer::by_name(name).unwrap().split(text, |word| {
                assert!(!word.is_empty());
                joined.push_str(word);
            });
            assert_eq!(joined, text, "{name}");
        }
    }

    #[test]
    fn look_ahead_stops_at_an_earlier_cut() {
        check("joyai-llm", "a  1", &["a", "  ", "1"]);
        check("joyai-llm", "a  b", &["a", " ", " b"]);
        check("qwen35", "a  1", &["a", " ", " ", "1"]);
    }

    #[test]
    fn white_space_keeps_its_last_character_only_before_a_word() {
        check("qwen2", "a   b", &["a", "  ", " b"]);
        check("qwen2", "a   ", &["a", "   "]);
        check("qwen2", "a \u{2003}\u{2003}!", &["a", " \u{2003}", "\u{2003}", "!"]);
        check("qwen2", " \n  b", &[" \n", " ", " b"]);
        check("qwen2", "\n \n\tb", &["\n \n", "\tb"]);
        check("qwen2", "\t1", &["\t", "1"]);
    }

    #[test]
    fn contractions_and_punctuation_with_line_ends() {
        check("qwen2", "I'LL don't;\n\n", &["I", "'LL", " don", "'t", ";\n\n"]);
        check("glm4", "1234567", &["123", "456", "7"]);
        check("deepseek-coder", " ab12\n.", &[" ab", "1", "2", "\n", "."]);
    }

    #[test]
    fn long_runs_stay_linear() {
        let text = format!("{}x", " ".repeat(2_000_000));
        let mut words = Vec::new();
        PreTokenizer::by_name("joyai-llm").unwrap().split(&text, |word| words.push(word.len()));
        assert_eq!(words, [1_999_999, 2]);
    }

    #[test]
    fn unknown_names_are_not_guessed() {
        assert!(PreTokenizer::by_name("deepseek").is_none());
    }
}
