//! `draconis mount`, and what mount(8) calls for the type `fuse.draconis`.

use std::ffi::{OsStr, OsString};
use std::path::{Component, Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, bail};
use clap::error::ErrorKind;
use clap::{CommandFactory, Parser};
use draconis_service::client::{Directory, ask, ask_or_start, ask_running};
use draconis_service::manager::Manager;
use draconis_service::options::MountOptions;
use draconis_service::protocol::{Reply, Request};

use crate::cli::{Cli, Command, Mount};
use crate::front::Fuse;

/// Names under which mount(8) calls this program, for the types `fuse.draconis` and
/// `draconis`.
const HELPERS: [&str; 3] = ["mount.fuse.draconis", "mount.fuseblk.draconis", "mount.draconis"];

/// Turns what mount(8) says into `draconis mount`; anything else stays as it is. It says
/// `mount.fuse.draconis IMAGE DIR [-sfnv] [-o OPTIONS] [-t TYPE]`, and where it finds no such
/// helper `draconis IMAGE DIR -o OPTIONS`, by way of mount.fuse3.
pub fn as_mount_helper(arguments: impl Iterator<Item = OsString>) -> Vec<OsString> {
    let arguments: Vec<OsString> = arguments.collect();
    let called = arguments.first().and_then(|name| Path::new(name).file_name());
    let called = called.and_then(OsStr::to_str).unwrap_or_default();
    if !HELPERS.contains(&called) && !names_image_and_dir(&arguments) {
        return arguments;
    }
    let mut translated: Vec<OsString> = vec!["draconis".into(), "mount".into()];
    let mut rest = arguments.into_iter().skip(1);
    while let Some(argument) = rest.next() {
        match argument.to_str() {
            // Sloppy options, no entry in mtab, verbose: without a meaning here.
            Some("-s" | "-n" | "-v") => {}
            Some("-t") => drop(rest.next()),
            _ => translated.push(argument),
        }
    }
    translated
}

/// Whether these are `IMAGE DIR -o OPTIONS` without a command before them.
fn names_image_and_dir(arguments: &[OsString]) -> bool {
    let [_, image, dir, option, _] = arguments else { return false };
    let is_command = |name: &OsStr| {
        let name = name.to_str().unwrap_or_default();
        Cli::command().find_subcommand(name).is_some()
    };
    let starts = |word: &OsStr| word.as_encoded_bytes().first() == Some(&b'-');
    option == "-o" && !starts(image) && !starts(dir) && !is_command(image)
}

pub fn run(arguments: &Mount) -> anyhow::Result<ExitCode> {
    let mut options = MountOptions::default();
    for list in &arguments.options {
        options.add(list)?;
    }
    let Some(dir) = &arguments.dir else {
        if options.remount {
            return remount(&arguments.image, &options);
        }
        let what = "the directory is missing: draconis mount IMAGE DIR";
        Cli::command().error(ErrorKind::MissingRequiredArgument, what).exit();
    };
    if options.remount {
        return remount(dir, &options);
    }
    let mount_point = mount_point(dir)?;
    if let Some(size) = &arguments.create {
        create(&arguments.image, size)?;
    }
    let volume = absolute(&arguments.image)?;
    let directory = Directory::open().context("cannot keep a manager's socket")?;
    if arguments.foreground {
        return foreground(&directory, volume, mount_point, options, arguments.replace);
    }
    let replace = arguments.replace;
    told(ask_or_start(&directory, &Request::Mount { volume, mount_point, options, replace })?)
}

/// Lets a mount be written, or not.
fn remount(dir: &Path, options: &MountOptions) -> anyhow::Result<ExitCode> {
    let mount_point = mount_point(dir)?;
    let name = mount_point.display().to_string();
    let read_only = options.read_only;
    match ask_running(&Directory::open()?, &Request::Remount { mount_point, read_only })? {
        None | Some(Reply::NotMounted) => bail!("{name}: no volume of this user is mounted there"),
        Some(reply) => told(reply),
    }
}

/// Makes an empty volume that belongs to whoever asks, as `draconis format` would.
fn create(image: &Path, size: &str) -> anyhow::Result<()> {
    let format = ["draconis", "format", "-E", "root_owner", "--"].map(OsStr::new);
    let arguments = format.into_iter().chain([image.as_os_str(), OsStr::new(size)]);
    match Cli::try_parse_from(arguments)?.command {
        Command::Format(format) => super::format::run(&format).map(drop),
        _ => Ok(()),
    }
}

/// Asks the running manager, or is one until this mount has ended.
fn foreground(
    directory: &Directory,
    volume: PathBuf,
    mount_point: PathBuf,
    options: MountOptions,
    replace: bool,
) -> anyhow::Result<ExitCode> {
    let Some(listener) = directory.bind()? else {
        return follow(directory, volume, mount_point, options, replace);
    };
    let manager = Manager::new(Box::new(Fuse));
    manager.listen(listener);
    let ending = manager.clone();
    super::serve::on_signal(move || ending.unmount_all())?;
    let notes = manager.mount(volume, mount_point.clone(), options, replace);
    let notes = notes.map_err(anyhow::Error::msg)?;
    told_notes(&notes);
    let why = manager.wait(&mount_point);
    // Others may have mounted through this manager meanwhile, or wait for an answer.
    manager.wait_idle(Duration::ZERO, false);
    ended(why)
}

/// Mounts through a manager that runs elsewhere, and waits for the end.
fn follow(
    directory: &Directory,
    volume: PathBuf,
    mount_point: PathBuf,
    options: MountOptions,
    replace: bool,
) -> anyhow::Result<ExitCode> {
    let unmount = Request::Unmount { mount_point: mount_point.clone(), force: true };
    let wait = Request::Wait { mount_point: mount_point.clone() };
    told(ask_or_start(directory, &Request::Mount { volume, mount_point, options, replace })?)?;
    let other = directory.clone();
    super::serve::on_signal(move || {
        if let Some(manager) = other.connect() {
            // The wait below tells how it went.
            let _ = ask(&manager, &unmount);
        }
    })?;
    match ask(&directory.connect_or_start()?, &wait)? {
        Reply::Ended { why } => ended(why),
        other => told(other),
    }
}

fn ended(why: Option<String>) -> anyhow::Result<ExitCode> {
    match why {
        None => Ok(ExitCode::SUCCESS),
        Some(why) => bail!("{why}"),
    }
}

/// Writes what a manager answered; its exit code.
pub fn told(reply: Reply) -> anyhow::Result<ExitCode> {
    match reply {
        Reply::Failed { why } => bail!("{why}"),
        Reply::NotMounted => bail!("no volume of ours is mounted there"),
        Reply::Mounted { notes } => told_notes(&notes),
        Reply::Cleared { why } => told_notes(&[format!("the mount was dead: {why}")]),
        Reply::Done | Reply::Status(_) | Reply::Ended { .. } => {}
    }
    Ok(ExitCode::SUCCESS)
}

fn told_notes(notes: &[String]) {
    for note in notes {
        eprintln!("draconis: {note}");
    }
}

fn absolute(path: &Path) -> anyhow::Result<PathBuf> {
    path.canonicalize().map_err(|error| no_path(path, &error))
}

/// The directory without links, found without asking the directory itself: a mount whose
/// worker hangs must be possible to name.
pub fn mount_point(dir: &Path) -> anyhow::Result<PathBuf> {
    without_links(dir).map_err(|error| no_path(dir, &error))
}

fn no_path(path: &Path, error: &std::io::Error) -> anyhow::Error {
    anyhow::anyhow!("{}: {}", path.display(), draconis_service::sentence(error))
}

fn without_links(dir: &Path) -> std::io::Result<PathBuf> {
    let dir = std::path::absolute(dir)?;
    let last = dir.components().next_back();
    match (dir.parent(), last) {
        (Some(parent), Some(Component::Normal(name))) => {
            let within = parent.canonicalize()?.join(name);
            let link = std::fs::read_link(&within).is_ok();
            if link { within.canonicalize() } else { Ok(within) }
        }
        _ => dir.canonicalize(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mount_helper_understands_what_mount_says() {
        let helped = |line: &str| {
            let arguments = line.split(' ').map(OsString::from);
            as_mount_helper(arguments).join(" ".as_ref()).into_string().unwrap()
        };
        assert_eq!(
            helped("/sbin/mount.fuse.draconis a.img /mnt -n -o ro,noatime -t fuse.draconis"),
            "draconis mount a.img /mnt -o ro,noatime"
        );
        assert_eq!(helped("mount.draconis a b -o rw"), "draconis mount a b -o rw");
        assert_eq!(
            helped("draconis /a.img /mnt -o rw,dev,suid"),
            "draconis mount /a.img /mnt -o rw,dev,suid"
        );
        for other in ["draconis mount -f a b", "draconis mount a -o ro", "draconis cp a -o b"] {
            assert_eq!(helped(other), other);
        }
    }
}
