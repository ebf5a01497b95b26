//! Where the tokens of a sweep come from: a text and the model's own choice, or uniformly random ids.
//! Never touches the model. Surprising fact: a model of random weights that follows its own choice soon repeats itself, and with it the
//! experts it asks for, so its cache looks better than any real model's would; random ids are the honest test of such a file.

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};

use crate::cli::bench::args::RunArgs;
use crate::cli::bench::schedule::Schedule;
use crate::cli::{CliError, input};
use crate::engine::options::EngineOptions;
use crate::engine::prepare::tokenizer;
use crate::units::TokenId;

/// Most random ids: more than any measurement takes, and no memory to speak of.
const DRAWN_MAX: usize = 1 << 26;

/// The tokens of a run.
pub struct Tokens {
    /// What is read, the begin token first.
    pub read: Vec<TokenId>,
    drawn: Option<Drawn>,
}

/// Random ids.
#[derive(Clone, Copy)]
struct Drawn {
    seed: u64,
    vocab: u32,
}

impl Tokens {
    /// What `args` ask for, as many as `schedule` needs.
    ///
    /// # Errors
    /// A usage error where nothing or too little is named; a file that cannot be read.
    pub fn new(args: &RunArgs, schedule: &Schedule, options: &EngineOptions) -> Result<Self, CliError> {
        match (args.sweep.prompt_file.as_deref(), args.sweep.random_tokens) {
            (_, Some(seed)) => {
                let needed = schedule.text_tokens_total();
                if needed > DRAWN_MAX {
                    return Err(CliError::usage(format!(
                        "the sweep needs {needed} random tokens, {DRAWN_MAX} at most are drawn; use fewer repetitions, appends or a \
                         smaller --ctx-max"
                    )));
                }
                let (tokenizer, _) = tokenizer(&options.model).map_err(CliError::failed)?;
                let drawn = Drawn { seed, vocab: tokenizer.tokens_total() as u32 };
                let rest = drawn.stream(0).take(needed);
                Ok(Self { read: tokenizer.bos().into_iter().chain(rest).collect(), drawn: Some(drawn) })
            }
            (Some(path), None) => {
                let text = input::text_file(path)?;
                let (tokenizer, _) = tokenizer(&options.model).map_err(CliError::failed)?;
                let encoded = tokenizer.encode(&text).map_err(CliError::failed)?;
                let read: Vec<TokenId> = tokenizer.bos().into_iter().chain(encoded).collect();
                schedule.check_text(&read)?;
                Ok(Self { read, drawn: None })
            }
            (None, None) => Err(CliError::usage(
                "no text to read: name a UTF-8 file with --prompt-file, such as benches/text/paradise_lost.txt, or use \
                 --random-tokens",
            )),
        }
    }

    /// What is appended at context length `frontier` of a pass that began at token `offset`, in place of the model's choice; always the
    /// same. `None` where the model chooses.
    pub fn generated(&self, offset: usize, frontier: usize) -> Option<impl Iterator<Item = TokenId> + use<>> {
        // Stream 0 is what is read.
        self.drawn.map(|drawn| drawn.stream(1 + ((offset as u64) << 32 | frontier as u64)))
    }

    /// As it stands in rows.
    pub fn name(&self) -> String {
        self.drawn.map_or_else(|| "text".into(), |drawn| format!("random {}", drawn.seed))
    }
}

impl Drawn {
    /// Ids without end.
    fn stream(self, number: u64) -> impl Iterator<Item = TokenId> {
        let mut rng = ChaCha8Rng::seed_from_u64(self.seed);
        rng.set_stream(number);
        std::iter::repeat_with(move || ((u64::from(rng.next_u32()) * u64::from(self.vocab)) >> 32) as TokenId)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_cover_the_vocabulary_and_depend_on_seed_and_place() {
        let drawn = Drawn { seed: 7, vocab: 10 };
        let take = |drawn: Drawn, stream| drawn.stream(stream).take(1000).collect::<Vec<_>>();
        let ids = take(drawn, 0);
        for id in 0..10 {
            let count = ids.iter().filter(|x| **x == id).count();
            assert!((60..140).contains(&count), "{id} came {count} times");
        }
        assert_eq!(ids, take(drawn, 0));
        assert_ne!(ids, take(drawn, 1));
        assert_ne!(ids, take(Drawn { seed: 8, ..drawn }, 0));
        let tokens = Tokens { read: Vec::new(), drawn: Some(drawn) };
        let generated = |offset, frontier| tokens.generated(offset, frontier).unwrap().take(1000).collect::<Vec<_>>();
        assert_eq!(generated(3, 5), generated(3, 5));
        assert!(generated(3, 5) != generated(5, 3) && generated(0, 0) != ids);
        assert!(Tokens { read: Vec::new(), drawn: None }.generated(3, 5).is_none());
    }
}
