//! The list of commands. Options and help texts are in each command's file.

use std::process::ExitCode;

use clap::{ArgMatches, CommandFactory, Parser, Subcommand};

use crate::commands::{
    cat, check, chmod, chown, complete_path, completions, cp, disk_process, export, format, get,
    grow, info, keeper, kv, lab, ln, ls, manpages, mkdir, mount, mv, put, repair, rescue, rm,
    sandbox_test, serve, set_label, shrink, stat, status, store, store_keeper, store_process, tar,
    touch, tree, truncate, tune, umount, undelete, untar, upgrade, worker,
};
use crate::{bucket, exit_status};

/// Version and build.
const VERSION: &str = concat!(env!("CARGO_PKG_VERSION"), " (", env!("DRACONIS_BUILD"), ")");

/// Read, change and mount untrusted ext2, ext3 and ext4 volumes in a sandbox.
#[derive(Debug, Parser)]
#[command(name = "draconis", version, long_version = VERSION)]
#[command(max_term_width = 100, propagate_version = true)]
#[command(
    after_help = "IMAGE is a file, a block device, or STORE#NAME (a disk in a store). IMAGE:/path names a file in \
    its volume. STORE is a file, a block device, s3://BUCKET/PREFIX, gs://.., az://.. or file:///DIR."
)]
pub struct Cli {
    /// Show progress messages; repeat for debug output.
    #[arg(short, long, global = true, action = clap::ArgAction::Count)]
    pub verbose: u8,

    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub enum Command {
    Mount(mount::Arguments),
    #[command(alias = "unmount")]
    Umount(umount::Arguments),
    Status(status::Arguments),
    Upgrade(upgrade::Arguments),
    Serve(serve::Arguments),
    Export(export::Arguments),
    Info(info::Arguments),
    Check(check::Arguments),
    Repair(repair::Arguments),
    Ls(ls::Arguments),
    Cat(cat::Arguments),
    Stat(stat::Arguments),
    Tree(tree::Arguments),
    Get(get::Arguments),
    Tar(tar::Arguments),
    Undelete(undelete::Arguments),
    Rescue(rescue::Arguments),
    #[command(visible_alias = "mkfs")]
    Format(Box<format::Arguments>),
    Put(put::Arguments),
    Untar(untar::Arguments),
    Cp(cp::Arguments),
    Mkdir(mkdir::Arguments),
    Rm(rm::Arguments),
    Mv(mv::Arguments),
    Ln(ln::Arguments),
    Chmod(chmod::Arguments),
    Chown(chown::Arguments),
    Touch(touch::Arguments),
    Truncate(truncate::Arguments),
    SetLabel(set_label::Arguments),
    Grow(grow::Arguments),
    Shrink(shrink::Arguments),
    Tune(tune::Arguments),
    Store(store::Arguments),
    Kv(kv::Arguments),
    Lab(lab::Arguments),
    Completions(completions::Arguments),
    Manpages(manpages::Arguments),
    #[command(hide = true)]
    CompletePath(complete_path::Arguments),
    #[command(hide = true)]
    Keeper(keeper::Arguments),
    #[command(hide = true)]
    DiskProcess(disk_process::Arguments),
    #[command(hide = true)]
    StoreKeeper(store_keeper::Arguments),
    #[command(hide = true)]
    StoreProcess(store_process::Arguments),
    #[command(hide = true)]
    SandboxTest(sandbox_test::Arguments),
    #[command(hide = true)]
    Worker(worker::Arguments),
}

impl Command {
    /// Runs the command; returns its exit code or the error to print.
    pub fn run(self) -> anyhow::Result<ExitCode> {
        match self {
            Self::Mount(arguments) => mount::run(&arguments),
            Self::Umount(arguments) => umount::run(&arguments),
            Self::Status(arguments) => status::run(&arguments),
            Self::Upgrade(arguments) => upgrade::run(&arguments),
            Self::Serve(arguments) => serve::run(&arguments),
            Self::Export(arguments) => export::run(&arguments),
            Self::Info(arguments) => info::run(&arguments),
            Self::Check(arguments) => Ok(check::run(&arguments)),
            Self::Repair(arguments) => Ok(repair::run(&arguments)),
            Self::Ls(arguments) => ls::run(&arguments),
            Self::Cat(arguments) => cat::run(&arguments),
            Self::Stat(arguments) => stat::run(&arguments),
            Self::Tree(arguments) => tree::run(&arguments),
            Self::Get(arguments) => get::run(&arguments),
            Self::Tar(arguments) => tar::run(&arguments),
            Self::Undelete(arguments) => undelete::run(&arguments),
            Self::Rescue(arguments) => rescue::run(&arguments),
            Self::Format(arguments) => format::run(&arguments),
            Self::Put(arguments) => put::run(&arguments),
            Self::Untar(arguments) => untar::run(&arguments),
            Self::Cp(arguments) => cp::run(&arguments),
            Self::Mkdir(arguments) => mkdir::run(&arguments),
            Self::Rm(arguments) => rm::run(&arguments),
            Self::Mv(arguments) => mv::run(&arguments),
            Self::Ln(arguments) => ln::run(&arguments),
            Self::Chmod(arguments) => chmod::run(&arguments),
            Self::Chown(arguments) => chown::run(&arguments),
            Self::Touch(arguments) => touch::run(&arguments),
            Self::Truncate(arguments) => truncate::run(&arguments),
            Self::SetLabel(arguments) => set_label::run(&arguments),
            Self::Grow(arguments) => grow::run(&arguments),
            Self::Shrink(arguments) => shrink::run(&arguments),
            Self::Tune(arguments) => tune::run(&arguments),
            Self::Store(arguments) => store::run(&arguments),
            Self::Kv(arguments) => kv::run(&arguments),
            Self::Lab(arguments) => lab::run(&arguments),
            Self::Completions(arguments) => completions::run(&arguments, command()),
            Self::Manpages(arguments) => manpages::run(&arguments, command_without_statuses()),
            Self::CompletePath(arguments) => complete_path::run(&arguments),
            Self::Keeper(arguments) => keeper::run(&arguments),
            Self::DiskProcess(_) => disk_process::run(),
            Self::StoreKeeper(_) => store_keeper::run(),
            Self::StoreProcess(arguments) => store_process::run(&arguments),
            Self::SandboxTest(arguments) => sandbox_test::run(&arguments),
            Self::Worker(arguments) => worker::run(&arguments),
        }
    }
}

/// Returns the command line as the program understands it: with the options of buckets where they
/// belong, and exit statuses in the help texts.
pub fn command() -> clap::Command {
    map_commands("", command_without_statuses(), &exit_status::add_to_help)
}

/// Returns the command line without exit statuses: manual pages have a section of them.
pub fn command_without_statuses() -> clap::Command {
    map_commands("", Cli::command(), &bucket::add_options)
}

/// Applies `change` to a command and all below it; it gets their names, such as `store put`.
fn map_commands(
    name: &str,
    command: clap::Command,
    change: &impl Fn(&str, clap::Command) -> clap::Command,
) -> clap::Command {
    let command = change(name, command);
    command.mut_subcommands(|below| {
        let name = format!("{name} {}", below.get_name());
        map_commands(name.trim_start(), below, change)
    })
}

/// Returns the name of the command, such as `store put`, and its own matches.
pub fn selected_command(matches: &ArgMatches) -> (String, &ArgMatches) {
    let mut name = String::new();
    let mut matches = matches;
    while let Some((next, below)) = matches.subcommand() {
        name = format!("{name} {next}").trim_start().to_owned();
        matches = below;
    }
    (name, matches)
}

/// Returns the names of all commands that do something.
#[cfg(test)]
pub fn all_command_names() -> Vec<String> {
    let names = std::cell::RefCell::new(vec![]);
    map_commands("", Cli::command(), &|name, command| {
        if !command.has_subcommands() {
            names.borrow_mut().push(name.to_owned());
        }
        command
    });
    names.into_inner()
}

/// Suggests the command for a name that other tools use.
pub fn suggest_command(name: &str) -> Option<&'static str> {
    Some(match name {
        "fsck" | "e2fsck" => {
            "draconis check IMAGE looks for damage, draconis repair IMAGE repairs it"
        }
        "mke2fs" | "mkfs.ext2" | "mkfs.ext3" | "mkfs.ext4" | "create" => {
            "draconis format [-t TYPE] IMAGE SIZE makes a volume"
        }
        "lsdel" | "undel" => "draconis undelete IMAGE lists deleted files and copies them out",
        "resize" | "resize2fs" => "draconis grow IMAGE and draconis shrink IMAGE change the size",
        "tune2fs" => "draconis tune IMAGE changes settings",
        "dumpe2fs" => "draconis info IMAGE shows the superblock",
        "e2label" | "label" => "draconis set-label IMAGE LABEL sets the label",
        "df" => "draconis info IMAGE shows used and free space",
        "rdump" | "extract" | "dump" | "copy-out" => {
            "draconis get -r IMAGE:/ DIR copies a tree out"
        }
        "write" | "copy-in" | "import" => "draconis put -r DIR IMAGE:/ copies a tree in",
        "debugfs" => "draconis ls, stat and cat read a volume",
        "list" | "dir" => "draconis ls IMAGE lists names",
        "unmount-all" => "draconis umount DIR unmounts",
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::archive_args::ArchiveArgs;
    use crate::image;

    #[test]
    fn clap_definition_is_valid() {
        command().debug_assert();
    }

    /// A command must not reuse the ID of a global argument: clap would mix up the two, whatever
    /// their types, and neither the compiler nor `debug_assert` detects it.
    #[test]
    fn subcommand_arguments_do_not_shadow_global_ones() {
        fn check_command(command: &clap::Command, of_all: &[&clap::Id]) -> usize {
            let look_at = |one: &clap::Command| {
                let ids: Vec<_> = one.get_arguments().map(|argument| argument.get_id()).collect();
                let twice = ids.iter().find(|id| of_all.contains(id));
                assert_eq!(twice, None, "{}", one.get_name());
                ids.len() + check_command(one, of_all)
            };
            command.get_subcommands().map(look_at).sum()
        }
        let command = super::command();
        let of_all = command.get_arguments().filter(|argument| argument.is_global_set());
        let of_all: Vec<_> = of_all.map(|argument| argument.get_id()).collect();
        assert!(of_all == ["verbose"] && check_command(&command, &of_all) > 100);
    }

    /// The table decides, not clap, which answers a question for an argument that a command lacks
    /// differently with and without debug assertions.
    #[test]
    fn bucket_options_belong_to_commands_that_open_buckets() {
        for name in all_command_names() {
            let mut found = command();
            for word in name.split(' ') {
                found = found.find_subcommand(word).unwrap().clone();
            }
            let has = |id: &str| found.get_arguments().any(|argument| argument.get_id() == id);
            for id in ["commit_ms", "deadline", "cache", "bucket_journal", "stats", "take_over"] {
                assert_eq!(has(id), bucket::takes_options(&name), "{name}: {id}");
            }
        }
        let parse = |line: &str| command().try_get_matches_from(line.split(' '));
        let matches = parse("draconis store ls --deadline 7 s3://a/b").unwrap();
        let (name, of_command) = selected_command(&matches);
        assert!(name == "store ls" && of_command.get_one::<u64>("deadline") == Some(&7));
        for line in ["draconis umount --deadline 7 a", "draconis --deadline 7 store ls s3://a/b"] {
            let error = parse(line).unwrap_err();
            assert_eq!(error.kind(), clap::error::ErrorKind::UnknownArgument, "{error}");
        }
    }

    /// `augment_args` gives a command the documentation of the options' struct as its description.
    #[test]
    fn every_command_has_a_description_of_its_own() {
        fn describe(command: &clap::Command) -> (String, String) {
            let text = |text: Option<&clap::builder::StyledStr>| text.map(ToString::to_string);
            let short = text(command.get_about()).unwrap_or_default();
            (short.clone(), text(command.get_long_about()).unwrap_or(short))
        }
        fn describe_options<T: clap::Args>() -> String {
            describe(&T::augment_args(clap::Command::new("options"))).0
        }
        let list = |command| {
            let found = std::cell::RefCell::new(vec![]);
            map_commands("", command, &|name, command| {
                found.borrow_mut().push((name.to_owned(), describe(&command)));
                command
            });
            found.into_inner()
        };
        let commands = list(command());
        assert_eq!(commands, list(Cli::command()));
        let mut seen = std::collections::BTreeMap::from([
            (describe_options::<bucket::BucketArgs>(), "BucketArgs"),
            (describe_options::<image::VolumeArgs>(), "VolumeArgs"),
            (describe_options::<image::ReadArgs>(), "ReadArgs"),
            (describe_options::<image::WriteArgs>(), "WriteArgs"),
            (describe_options::<image::SuperblockArgs>(), "SuperblockArgs"),
            (describe_options::<ArchiveArgs>(), "ArchiveArgs"),
        ]);
        for (name, (short, long)) in &commands {
            assert!(!short.is_empty() && long.starts_with(short.as_str()), "{name}: {long}");
            let other = seen.insert(short.clone(), name);
            assert_eq!(other, None, "{name}: {short}");
        }
        assert!(commands.len() > 60, "{}", commands.len());
    }

    #[test]
    fn values_may_begin_with_hyphen() {
        let parse = |line: &str| Cli::try_parse_from(line.split(' ')).map(|cli| cli.command);
        assert!(matches!(parse("draconis chmod -R -x a.img:/b"), Ok(Command::Chmod(_))));
        assert!(matches!(parse("draconis truncate -s -5K a.img:/b"), Ok(Command::Truncate(_))));
        assert!(matches!(parse("draconis chown -h 5 a.img:/b"), Ok(Command::Chown(_))));
        assert!(parse("draconis mv a.img:/b").is_err());
        assert!(parse("draconis put a.img:/b").is_err());
    }
}
