//! Warnings of the layers below, as lines of stderr under the program's name.
//! Never colours and never fails a run: a stderr that nobody can write to loses the line. Surprising fact: whoever warns does not know which program
//! it is part of, so the name is put in front here.

use std::fmt;

use tracing::{Event, Subscriber};
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::registry::LookupSpan;
use tracing_subscriber::{Layer, fmt as lines};

use tracing::level_filters::LevelFilter;

/// Puts a program's name in front.
struct Under(&'static str);

impl<S, N> FormatEvent<S, N> for Under
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(&self, context: &FmtContext<'_, S, N>, mut to: Writer<'_>, event: &Event<'_>) -> fmt::Result {
        write!(to, "{}: warning: ", self.0)?;
        context.format_fields(to.by_ref(), event)?;
        writeln!(to)
    }
}

/// Writes warnings to stderr, under the name of `program`.
pub fn layer<S>(program: &'static str) -> impl Layer<S>
where
    S: Subscriber + for<'a> LookupSpan<'a>,
{
    let lines = lines::layer().with_writer(std::io::stderr).with_ansi(false).log_internal_errors(false);
    lines.event_format(Under(program)).with_filter(LevelFilter::WARN)
}
