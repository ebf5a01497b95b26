//! The file of `--trace-routes`: the engine writes the trace, this gives it its name at the end.
//! Never leaves a part of a trace under that name. Surprising fact: two hold the file, the engine to write and the front end to finish.

use std::io::{self, Write};
use std::path::Path;
use std::sync::Arc;

use parking_lot::Mutex;

use crate::cli::CliError;
use crate::cli::whole_file::WholeFile;
use crate::engine::Engine;

#[derive(Clone)]
struct Shared(Arc<Mutex<WholeFile>>);

impl Write for Shared {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.lock().flush()
    }
}

/// A trace that is being recorded, and the flag that asked for it.
pub struct TraceFile(Shared, &'static str);

fn cannot(flag: &str, path: &Path, error: &io::Error) -> CliError {
    CliError::failed(format!("{flag}: cannot write {}: {error}", path.display()))
}

impl TraceFile {
    /// Records what `engine` does from now on, as `flag` asks for.
    ///
    /// # Errors
    /// A file that cannot be made.
    pub fn begin(flag: &'static str, path: &Path, engine: &Engine) -> Result<Self, CliError> {
        let file = WholeFile::create(path).map_err(|e| cannot(flag, path, &e))?;
        let shared = Shared(Arc::new(Mutex::new(file)));
        engine.begin_trace(Box::new(shared.clone())).map_err(|e| cannot(flag, path, &e))?;
        Ok(Self(shared, flag))
    }

    /// Ends the recording and gives the file its name.
    ///
    /// # Errors
    /// A full disk, for example.
    pub fn finish(self, path: &Path, engine: &Engine) -> Result<(), CliError> {
        let flag = self.1;
        engine.end_trace().map_err(|e| cannot(flag, path, &e))?;
        let file = Arc::into_inner(self.0.0).expect("the engine has let go of it").into_inner();
        file.finish().map_err(|e| cannot(flag, path, &e))
    }
}
