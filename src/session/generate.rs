//! The decode loop: choose, show, append, until a rule says stop.
//! Never prints; text goes to the caller's hook as it becomes certain. Surprising fact: the reads of the next token's table rows are
//! started before its text is shown, so that the drive works while the terminal does.

use std::time::{Duration, Instant};

use crate::models::Want;
use crate::session::sampler::{Choice, Sampler, SamplerError, top_logprobs};
use crate::session::stop::StopRules;
use crate::session::timeline::{Flow, SessionError, Timeline, Watcher};
use crate::text::tokenizer::Tokenizer;
use crate::text::utf8_stream::Utf8Stream;
use crate::units::TokenId;

/// Why an answer could not be finished.
#[derive(Debug, thiserror::Error)]
pub enum GenerateError {
    #[error(transparent)]
    Session(#[from] SessionError),
    #[error(transparent)]
    Sampler(#[from] SamplerError),
}

/// What ended an answer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Ended {
    /// The model said so, or a stop string was written.
    Stop,
    /// As many tokens as were asked for.
    Tokens,
    /// The context is full.
    Context,
    /// The caller stopped it.
    Caller,
}

/// One token of an answer.
pub struct Piece<'a> {
    /// The chosen token; `None` for text that was held back until the end.
    pub choice: Option<Choice>,
    /// Text that became certain with it; may be empty.
    pub text: &'a str,
    /// Best alternatives, when asked for.
    pub top: &'a [Choice],
}

/// What to generate.
pub struct GenerateOptions {
    /// Most tokens.
    pub tokens_max: usize,
    /// Whether choices carry their probability.
    pub is_scored: bool,
    /// Alternatives to report per token.
    pub top_logprobs: usize,
    /// `Last`, or `All` to hand the logits of every pass to the watcher too.
    pub want: Want,
}

/// What was generated.
#[derive(Clone, PartialEq, Debug)]
pub struct Answer {
    /// All tokens that were chosen, a stop token included.
    pub tokens: Vec<TokenId>,
    pub text: String,
    pub ended: Ended,
    /// Passes of one token that were made, and the time for them and the choices.
    pub passes: u64,
    pub elapsed: Duration,
}

/// Receives pieces as they come.
pub type OnPiece<'a> = dyn FnMut(&Piece<'_>) -> Flow + 'a;

/// The next token of `timeline`.
fn choose(timeline: &mut Timeline, sampler: &mut Sampler, options: &GenerateOptions) -> Result<Choice, GenerateError> {
    if let Some(id) = timeline.chosen() {
        sampler.take_number();
        return Ok(Choice { id, logprob: f32::NAN });
    }
    // A runner that could not choose leaves it to the sampler to say why.
    timeline.fetch_logits()?;
    Ok(match options.is_scored {
        true => sampler.sample(timeline.last_logits())?,
        false => Choice { id: sampler.choose(timeline.last_logits())?, logprob: f32::NAN },
    })
}

/// Continues `timeline`, whose last logits are valid, with an answer.
///
/// # Errors
/// A failed pass or logits that nothing can be chosen from. The timeline holds all tokens that were computed.
pub fn generate(
    timeline: &mut Timeline,
    tokenizer: &Tokenizer,
    sampler: &mut Sampler,
    rules: StopRules,
    options: &GenerateOptions,
    watcher: &mut dyn Watcher,
    on_piece: &mut OnPiece<'_>,
) -> Result<Answer, GenerateError> {
    let answer = answer(timeline, tokenizer, sampler, rules, options, watcher, on_piece);
    // Whoever goes on from here finds logits.
    let fetched = timeline.fetch_logits();
    let answer = answer?;
    fetched?;
    Ok(answer)
}

fn answer(
    timeline: &mut Timeline,
    tokenizer: &Tokenizer,
    sampler: &mut Sampler,
    mut rules: StopRules,
    options: &GenerateOptions,
    watcher: &mut dyn Watcher,
    on_piece: &mut OnPiece<'_>,
) -> Result<Answer, GenerateError> {
    let is_simple = !options.is_scored && options.top_logprobs == 0 && options.want == Want::Last;
    let started = Instant::now();
    let mut utf8 = Utf8Stream::new();
    let mut answer =
        Answer { tokens: Vec::new(), text: String::new(), ended: Ended::Tokens, passes: 0, elapsed: Duration::ZERO };
    while answer.tokens.len() < options.tokens_max {
        let choice = choose(timeline, sampler, options)?;
        let top = match options.top_logprobs {
            0 => Vec::new(),
            count => top_logprobs(timeline.last_logits(), count),
        };
        answer.tokens.push(choice.id);
        if rules.is_stop_token(choice.id) {
            answer.ended = Ended::Stop;
            on_piece(&Piece { choice: Some(choice), text: "", top: &top });
            break;
        }
        // The last token of an answer needs no pass: nothing is chosen after it.
        let has_next = answer.tokens.len() < options.tokens_max && timeline.tokens().len() < timeline.ctx();
        if has_next {
            timeline.announce(choice.id)?;
        }
        let step = rules.push(&utf8.push(tokenizer.token_bytes(choice.id).unwrap_or_default()));
        answer.text.push_str(&step.text);
        let flow = on_piece(&Piece { choice: Some(choice), text: &step.text, top: &top });
        if step.stopped_by.is_some() {
            answer.ended = Ended::Stop;
            answer.elapsed = started.elapsed();
            return Ok(answer);
        }
        if flow == Flow::Stop {
            answer.ended = Ended::Caller;
            break;
        }
        if timeline.tokens().len() == timeline.ctx() {
            answer.ended = Ended::Context;
            break;
        }
        if has_next {
            match is_simple {
                true => timeline.append_to_choose(choice.id, sampler.next_rule(), watcher)?,
                false => timeline.append(&[choice.id], options.want, watcher)?,
            }
            answer.passes += 1;
        }
    }
    let rest = rules.push(&utf8.finish()).text + &rules.finish();
    if !rest.is_empty() {
        answer.text.push_str(&rest);
        on_piece(&Piece { choice: None, text: &rest, top: &[] });
    }
    answer.elapsed = started.elapsed();
    Ok(answer)
}
