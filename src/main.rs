//! The `draconis` command.
#![forbid(unsafe_code)]
// These macros panic if the output is closed; `report` does not.
#![deny(clippy::print_stdout, clippy::print_stderr)]

mod archive_args;
mod bucket;
mod cli;
mod commands;
mod edit;
mod extract;
mod fuse_mounter;
mod image;
mod import_tree;
mod logging;
mod manual;
mod modes;
mod mount_helper;
mod new_file;
mod progress;
mod report;
mod target;
mod text;

use std::process::ExitCode;

use clap::{CommandFactory, Parser};

/// musl's allocator is slower, and unmaps memory that is soon needed again (docs/decisions/0089).
#[cfg(target_env = "musl")]
#[global_allocator]
static ALLOCATOR: dlmalloc::GlobalDlmalloc = dlmalloc::GlobalDlmalloc;

/// Exits with a usage error, or after printing help.
fn exit_with_usage_error(mut error: clap::Error) -> ! {
    use clap::error::{ContextKind, ContextValue, ErrorKind};
    if error.kind() == ErrorKind::InvalidSubcommand
        && let Some(ContextValue::String(name)) = error.get(ContextKind::InvalidSubcommand)
        && let Some(hint) = cli::suggest_command(name)
    {
        error.remove(ContextKind::SuggestedSubcommand);
        error.insert(ContextKind::Suggested, ContextValue::StyledStrs(vec![hint.into()]));
    }
    error.exit()
}

fn main() -> ExitCode {
    let arguments = mount_helper::translate_mount_helper_args(std::env::args_os());
    let cli =
        cli::Cli::try_parse_from(arguments).unwrap_or_else(|error| exit_with_usage_error(error));
    logging::init_logging(cli.verbose);
    bucket::set_cli_options(&cli.bucket);
    let done = cli.command.run();
    bucket::close_open_buckets();
    match done {
        Ok(code) => code,
        Err(error) => match error.downcast::<clap::Error>() {
            Ok(usage) => usage.format(&mut cli::Cli::command()).exit(),
            Err(error) => report::report_failure(&error, 1),
        },
    }
}
