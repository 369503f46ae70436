//! The `draconis` command.
#![forbid(unsafe_code)]
// These macros panic if the output is closed; `report` does not.
#![deny(clippy::print_stdout, clippy::print_stderr)]

mod archive_args;
mod bucket;
mod cli;
mod commands;
mod edit;
mod exit_status;
mod extract;
mod fuse_mounter;
mod image;
mod import_tree;
mod interrupt;
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

use clap::FromArgMatches;

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
    if error.kind() == ErrorKind::UnknownArgument
        && let Some(ContextValue::String(option)) = error.get(ContextKind::InvalidArg)
        && bucket::is_option(option)
    {
        let hint =
            format!("{option} is for buckets; it follows the name of a command that opens one");
        error.remove(ContextKind::SuggestedArg);
        error.insert(ContextKind::Suggested, ContextValue::StyledStrs(vec![hint.into()]));
    }
    error.exit()
}

fn main() -> ExitCode {
    let arguments = mount_helper::translate_mount_helper_args(std::env::args_os());
    let matches = cli::command().try_get_matches_from(arguments);
    let matches = matches.unwrap_or_else(|error| exit_with_usage_error(error));
    let cli = cli::Cli::from_arg_matches(&matches);
    let cli = cli.unwrap_or_else(|error| exit_with_usage_error(error));
    let (name, of_command) = cli::selected_command(&matches);
    logging::init_logging(cli.verbose, &name);
    interrupt::set_command(&name);
    if bucket::takes_options(&name) {
        let options = bucket::BucketArgs::from_arg_matches(of_command);
        bucket::set_cli_options(options.unwrap_or_else(|error| exit_with_usage_error(error)));
    }
    let done = cli.command.run();
    bucket::close_open_buckets();
    match done {
        Ok(code) => code,
        Err(error) => match error.downcast::<clap::Error>() {
            Ok(usage) => usage.format(&mut cli::command()).exit(),
            Err(error) => report::report_failure(&error, 1),
        },
    }
}
