//! The `draconis` command.
#![forbid(unsafe_code)]

mod change;
mod cli;
mod commands;
mod front;
mod graft;
mod image;
mod logging;
mod manual;
mod modes;
mod populate;
mod progress;
mod say;
mod signature;
mod target;
mod text;
mod walk;

use std::process::ExitCode;

use clap::Parser;

fn main() -> ExitCode {
    let arguments = commands::mount::as_mount_helper(std::env::args_os());
    let cli = cli::Cli::parse_from(arguments);
    logging::start(cli.verbose);
    match commands::run(cli.command) {
        Ok(code) => code,
        // As a program that the signal ended: whoever reads has seen enough.
        Err(error) if is_broken_pipe(&error) => ExitCode::from(128 + 13),
        Err(error) => {
            say::complain(&error);
            ExitCode::FAILURE
        }
    }
}

fn is_broken_pipe(error: &anyhow::Error) -> bool {
    let mut errors = error.chain().filter_map(|error| error.downcast_ref::<std::io::Error>());
    errors.any(|error| error.kind() == std::io::ErrorKind::BrokenPipe)
}
