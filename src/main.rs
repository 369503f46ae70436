//! The `draconis` command.
#![forbid(unsafe_code)]

mod cli;
mod commands;
mod front;
mod image;
mod logging;
mod populate;
mod progress;
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
        Err(error) => {
            eprintln!("draconis: {error:#}");
            ExitCode::FAILURE
        }
    }
}
