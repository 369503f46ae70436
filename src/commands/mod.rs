//! What each command does, one file each.

mod cat;
mod check;
mod chmod;
mod complete_path;
mod cp;
mod format;
mod get;
mod grow;
mod info;
mod kv;
mod lab;
mod ln;
mod ls;
mod mkdir;
pub mod mount;
mod mv;
mod put;
mod rm;
mod serve;
mod set_label;
mod stat;
mod status;
mod store;
mod tar;
mod texts;
mod touch;
mod tree;
mod umount;
mod worker;

use std::process::ExitCode;

pub use chmod::NewOwner;
pub use touch::NewSize;

use crate::cli::Command;

/// A path and a name below it.
pub fn join(dir: &[u8], name: &[u8]) -> Vec<u8> {
    let slash: &[u8] = if dir.ends_with(b"/") || dir.is_empty() { b"" } else { b"/" };
    [dir, slash, name].concat()
}

/// Runs a command; its exit code, or an error to be written.
pub fn run(command: Command) -> anyhow::Result<ExitCode> {
    match command {
        Command::Mount(arguments) => mount::run(&arguments),
        Command::Umount(arguments) => umount::run(&arguments),
        Command::Status(arguments) => status::run(&arguments),
        Command::Serve(arguments) => serve::run(&arguments),
        Command::Info(arguments) => info::run(&arguments),
        Command::Check(arguments) => Ok(check::run(&arguments)),
        Command::Ls(arguments) => ls::run(&arguments),
        Command::Cat(arguments) => cat::run(&arguments),
        Command::Stat(arguments) => stat::run(&arguments),
        Command::Tree(arguments) => tree::run(&arguments),
        Command::Get(arguments) => get::run(&arguments),
        Command::Tar(arguments) => tar::run(&arguments),
        Command::Format(arguments) => format::run(&arguments),
        Command::Put(arguments) => put::put(&arguments),
        Command::Untar(arguments) => put::untar(&arguments),
        Command::Cp(arguments) => cp::run(&arguments),
        Command::Mkdir(arguments) => mkdir::run(&arguments),
        Command::Rm(arguments) => rm::run(&arguments),
        Command::Mv(arguments) => mv::run(&arguments),
        Command::Ln(arguments) => ln::run(&arguments),
        Command::Chmod(arguments) => chmod::chmod(&arguments),
        Command::Chown(arguments) => chmod::chown(&arguments),
        Command::Touch(arguments) => touch::touch(&arguments),
        Command::Truncate(arguments) => touch::truncate(&arguments),
        Command::SetLabel(arguments) => set_label::run(&arguments),
        Command::Grow(arguments) => grow::run(&arguments),
        Command::Store(command) => store::run(&command),
        Command::Kv(command) => kv::run(&command),
        Command::Lab { arguments } => lab::run(&arguments),
        Command::CompletePath(arguments) => complete_path::run(&arguments),
        Command::Completions { shell } => texts::completions(shell),
        Command::Manpages { dir } => texts::manpages(&dir),
        Command::Worker { memory } => worker::run(memory),
    }
}
