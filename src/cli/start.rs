//! How each program of the project begins: limits that would end it without a word are told or stepped around.
//! Never changes a limit. Surprising fact: the first thread has the stack that `ulimit -s` gives it, which can be less than parsing a command line
//! takes, while any other thread has what it is made with.

use std::process::ExitCode;
use std::thread;

use crate::cli::output::note_as;
use crate::sys;
use crate::units::Bytes;

/// Stack of the thread that a program runs on, where the first one has less than [`STACK_LEAST`].
const STACK: Bytes = Bytes::mib(8);
const STACK_LEAST: Bytes = Bytes::mib(2);
/// Memory that is taken before the planner knows what there is: below it the allocator would end the process.
const ROOM_LEAST: Bytes = Bytes::mib(8);

/// Runs `main`, which is all of `program`.
pub fn start(program: &'static str, main: fn() -> ExitCode) -> ExitCode {
    sys::save_addresses();
    sys::outlive_file_size_limit();
    if let Some(left) = sys::address_space_left().filter(|left| *left < ROOM_LEAST) {
        note_as(
            program,
            &format!("ulimit -v or -d leaves {left}, and {ROOM_LEAST} are needed to begin; raise the limit"),
        );
        return ExitCode::FAILURE;
    }
    if sys::stack_limit().is_none_or(|limit| limit >= STACK_LEAST) {
        return main();
    }
    let name = format!("{program}-main");
    match thread::Builder::new().name(name).stack_size(STACK.0 as usize).spawn(main) {
        // A panic was told by its thread; this is the code that it has on the first one.
        Ok(thread) => thread.join().unwrap_or(ExitCode::from(101)),
        Err(error) => {
            note_as(
                program,
                &format!("ulimit -s gives a stack of less than {STACK_LEAST}, and no other can be had: {error}"),
            );
            ExitCode::FAILURE
        }
    }
}
