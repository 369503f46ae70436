//! `draconis completions`, generated from the clap definition.

use std::io::Write;
use std::process::ExitCode;

use clap::{Args, Command};
use clap_complete::Shell;

/// Print a shell completion script.
#[derive(Debug, Args)]
pub struct Arguments {
    /// Shell.
    shell: Shell,
}

/// Additional bash functions that complete paths on the host and in images.
const BASH_PATH_COMPLETION: &str = include_str!("completions/paths.bash");

pub fn run(arguments: &Arguments, mut line: Command) -> anyhow::Result<ExitCode> {
    let mut script = vec![];
    clap_complete::generate(arguments.shell, &mut line, "draconis", &mut script);
    if arguments.shell == Shell::Bash {
        script.extend_from_slice(BASH_PATH_COMPLETION.as_bytes());
    }
    std::io::stdout().write_all(&script)?;
    Ok(ExitCode::SUCCESS)
}
