//! Saved sessions as `ds4` meets them: `--save-session`, `--load-session`, `/save`, `/load`.
//! Never touches a session before the file was found sound and the model's own. Surprising fact: the random numbers go on only under the
//! seed that they came from; another `--seed` starts its own.

use std::path::Path;

use crate::cli::CliError;
use crate::cli::args::Cli;
use crate::cli::input::Prompt;
use crate::cli::output::note;
use crate::cli::whole_file::WholeFile;
use crate::engine::Engine;
use crate::session::checkpoint::{self, Checkpoint, CheckpointError, ModelMark};
use crate::session::sampler::Sampler;
use crate::session::timeline::{Timeline, shared};
use crate::text::chat::{Message, Role};
use crate::units::{Bytes, TokenId};

/// Messages and reasoning level; no messages for bare tokens.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Talk {
    pub messages: Option<Vec<Message>>,
    pub level: Option<u8>,
}

impl Talk {
    /// What the command line says before anything was said.
    pub fn begin(cli: &Cli) -> Self {
        let system = cli.prompt.system.iter().map(|text| Message::new(Role::System, text.as_str()));
        Self { messages: Some(system.collect()), level: cli.thinking.level() }
    }
}

fn mark(cli: &Cli, engine: &Engine) -> Result<ModelMark, CliError> {
    let path = engine.prepared.file.path();
    Ok(ModelMark {
        identity: engine.identity().map_err(CliError::failed)?.to_string(),
        name: path.file_name().unwrap_or(path.as_os_str()).to_string_lossy().into_owned(),
        arch: engine.prepared.config.arch().into(),
        is_quality: cli.model.quality,
        is_kv_exact: cli.model.kv_exact,
    })
}

/// Saves a session under `path`; an older file of that name stays until this one is complete.
///
/// # Errors
/// An empty session; a file that cannot be written.
pub fn save(
    (cli, engine, path): (&Cli, &Engine, &Path),
    timeline: &mut Timeline,
    talk: &Talk,
    sampler: &Sampler,
) -> Result<(), CliError> {
    let cannot = |e: std::io::Error| CliError::failed(format!("cannot write the session {}: {e}", path.display()));
    let mark = mark(cli, engine)?;
    let messages = talk.messages.as_deref().map(|messages| (messages, talk.level));
    let mut file = WholeFile::create(path).map_err(cannot)?;
    let bytes = checkpoint::write(&mut file, &mark, timeline, messages, sampler).map_err(|error| match error {
        CheckpointError::Write(error) => cannot(error),
        other => CliError::failed(other),
    })?;
    file.finish().map_err(cannot)?;
    note(&format!("note: {} tokens saved to {} ({})", timeline.tokens().len(), path.display(), Bytes(bytes)));
    Ok(())
}

/// Opens a saved session and sees that it is whole, which needs no model.
///
/// # Errors
/// A file that is no session, or a damaged one.
pub fn open(path: &Path) -> Result<Checkpoint, CliError> {
    Checkpoint::open(path).map_err(CliError::failed)
}

/// Refuses a prompt that has nothing to do with the session: text needs a conversation to go on with.
///
/// # Errors
/// Text, or none, for a session of bare tokens.
pub fn check_prompt(checkpoint: &Checkpoint, prompt: Option<&Prompt>) -> Result<(), CliError> {
    match prompt {
        Some(Prompt::Tokens(_)) => Ok(()),
        _ if checkpoint.messages().is_some() => Ok(()),
        _ => Err(CliError::failed("the session holds tokens without a conversation; go on with --tokens-file")),
    }
}

/// Makes `timeline` and `sampler` those of the session. The flags' own system text must be the session's; their reasoning level wins.
///
/// # Errors
/// Another model's session, a longer one than the context, a damaged one.
pub fn restore(
    (cli, engine): (&Cli, &Engine),
    checkpoint: Checkpoint,
    timeline: &mut Timeline,
    sampler: &mut Sampler,
) -> Result<Talk, CliError> {
    if let (Some(given), Some(messages)) = (&cli.prompt.system, checkpoint.messages()) {
        let is_same = messages.first().is_some_and(|m| m.role == Role::System && m.content == *given);
        if !is_same {
            return Err(CliError::usage("the session has a system text of its own; leave --system out"));
        }
    }
    let restored = checkpoint.restore(&mark(cli, engine)?, timeline).map_err(CliError::failed)?;
    restored.notes.iter().for_each(|line| note(line));
    if restored.sampler.seed == sampler.params().seed {
        sampler.resume(restored.sampler.position);
    }
    let (messages, level) = restored.talk.map_or((None, None), |(messages, level)| (Some(messages), level));
    note(&format!("note: a session of {} tokens goes on", timeline.tokens().len()));
    Ok(Talk { messages, level: cli.thinking.level().or(level) })
}

/// Refuses tokens that have nothing in common with the session, and says how much of it they go on from.
///
/// # Errors
/// `Failed` when not even the first token agrees.
pub fn check_tokens(timeline: &Timeline, tokens: &[TokenId]) -> Result<(), CliError> {
    let held = timeline.tokens();
    let agree = shared(held, tokens);
    if agree == 0 && !held.is_empty() {
        return Err(CliError::failed("--tokens-file does not begin as the session does; leave --load-session out"));
    }
    if agree < held.len() {
        note(&format!(
            "note: {agree} of the session's {} tokens begin --tokens-file; the others are left out",
            held.len()
        ));
    }
    Ok(())
}
