//! The slash commands of the interactive session, as data.
//! Parses only. Surprising fact: a line that starts with a slash but names no command is refused rather than sent to the
//! model, because a mistyped `/quit` should not cost a prefill; `//` at the start sends a line that begins with a slash.

use std::path::PathBuf;

/// What a line typed at the prompt means.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Line {
    /// Nothing to do.
    Empty,
    /// Text for the model.
    Say(String),
    Help,
    Quit,
    /// Reasoning level from now on; 0 answers at once.
    Think(u8),
    /// Start over with another context length.
    Ctx(u32),
    /// Send a file's text as the next message.
    Read(PathBuf),
    Status,
    Stats,
    Clear,
    Regen,
    /// Save the session.
    Save(PathBuf),
    /// Go on with a saved session.
    Load(PathBuf),
    /// Forget this many of the last questions and their answers.
    Rewind(u32),
}

/// The commands, as `/help` prints them and as completion offers them.
pub const COMMANDS: &[(&str, &str)] = &[
    ("/help", "list the commands"),
    ("/quit", "leave (also Ctrl-D)"),
    ("/think [N]", "reason before answering, level N (1-100, default 75)"),
    ("/nothink", "answer without reasoning"),
    ("/ctx N", "start over with a context of N tokens"),
    ("/read FILE", "send the text of FILE"),
    ("/status", "model, context used, memory plan"),
    ("/stats", "counters since the start"),
    ("/clear", "forget the conversation"),
    ("/regen", "answer the last message again"),
    ("/rewind [N]", "forget the last N questions and their answers (default 1)"),
    ("/save FILE", "save the session"),
    ("/load FILE", "go on with a saved session"),
];

/// Reads one line.
///
/// # Errors
/// A sentence for the user, when the command or its argument is not understood.
pub fn parse(line: &str) -> Result<Line, String> {
    let trimmed = line.trim();
    if trimmed.is_empty() {
        return Ok(Line::Empty);
    }
    if let Some(rest) = trimmed.strip_prefix("//") {
        return Ok(Line::Say(format!("/{rest}")));
    }
    if !trimmed.starts_with('/') {
        return Ok(Line::Say(trimmed.to_owned()));
    }
    let (name, argument) = trimmed.split_once(char::is_whitespace).unwrap_or((trimmed, ""));
    let argument = argument.trim();
    let plain = |line: Line| if argument.is_empty() { Ok(line) } else { Err(format!("{name} takes no argument")) };
    match name {
        "/help" => plain(Line::Help),
        "/quit" | "/exit" => plain(Line::Quit),
        "/nothink" => plain(Line::Think(0)),
        "/status" => plain(Line::Status),
        "/stats" => plain(Line::Stats),
        "/clear" => plain(Line::Clear),
        "/regen" => plain(Line::Regen),
        "/think" if argument.is_empty() => Ok(Line::Think(75)),
        "/think" => match argument.parse::<u8>() {
            Ok(level) if level <= 100 => Ok(Line::Think(level)),
            _ => Err(format!("/think takes a level from 0 to 100, not `{argument}`")),
        },
        "/ctx" => match argument.parse::<u32>() {
            Ok(tokens) if tokens > 0 => Ok(Line::Ctx(tokens)),
            _ => Err(format!("/ctx takes a number of tokens, not `{argument}`")),
        },
        "/rewind" if argument.is_empty() => Ok(Line::Rewind(1)),
        "/rewind" => match argument.parse::<u32>() {
            Ok(count) if count > 0 => Ok(Line::Rewind(count)),
            _ => Err(format!("/rewind takes a number of questions, not `{argument}`")),
        },
        "/save" | "/load" if argument.is_empty() => Err(format!("{name} takes a file name")),
        "/save" => Ok(Line::Save(PathBuf::from(argument))),
        "/load" => Ok(Line::Load(PathBuf::from(argument))),
        "/read" if argument.is_empty() => Err("/read takes a file name".into()),
        "/read" => Ok(Line::Read(PathBuf::from(argument))),
        _ => Err(format!("no command {name}; /help lists them, // sends a line that begins with a slash")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_mean_what_they_say() {
        let cases: &[(&str, Line)] = &[
            ("", Line::Empty),
            ("  \t", Line::Empty),
            (" hello ", Line::Say("hello".into())),
            ("//etc/passwd", Line::Say("/etc/passwd".into())),
            ("/help", Line::Help),
            ("/exit", Line::Quit),
            ("/think", Line::Think(75)),
            ("/think 30", Line::Think(30)),
            ("/nothink", Line::Think(0)),
            ("/ctx 4096", Line::Ctx(4096)),
            ("/read a file.txt", Line::Read("a file.txt".into())),
            ("/regen", Line::Regen),
            ("/rewind", Line::Rewind(1)),
            ("/rewind 3", Line::Rewind(3)),
            ("/save a b.ds4", Line::Save("a b.ds4".into())),
            ("/load x", Line::Load("x".into())),
        ];
        for (line, meaning) in cases {
            assert_eq!(parse(line).as_ref(), Ok(meaning), "{line:?}");
        }
    }

    #[test]
    fn mistakes_are_named() {
        for line in [
            "/quti",
            "/think 101",
            "/think x",
            "/ctx",
            "/ctx 0",
            "/ctx -1",
            "/read",
            "/clear now",
            "/rewind 0",
            "/rewind x",
            "/save",
            "/load ",
        ] {
            assert!(parse(line).is_err(), "{line:?}");
        }
    }

    #[test]
    fn every_listed_command_parses() {
        for (usage, _) in COMMANDS {
            let line = usage.replace("[N]", "5").replace(" N", " 5").replace("FILE", "x");
            assert!(parse(&line).is_ok(), "{line}");
        }
    }
}
