//! `draconis mount`, and what mount(8) calls for the type `fuse.draconis`.

use std::ffi::{OsStr, OsString};
use std::path::{Component, Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, bail};
use clap::Parser;
use draconis_service::client::{Directory, ask};
use draconis_service::manager::Manager;
use draconis_service::options::MountOptions;
use draconis_service::protocol::{Reply, Request};

use crate::cli::{Cli, Command, Mount};
use crate::front::Fuse;

/// The name under which mount(8) calls this program.
const HELPER: &str = "mount.fuse.draconis";

/// Turns `mount.fuse.draconis IMAGE DIR [-sfnv] [-o OPTIONS] [-t TYPE]` into
/// `draconis mount`; anything else stays as it is.
pub fn as_mount_helper(arguments: impl Iterator<Item = OsString>) -> Vec<OsString> {
    let arguments: Vec<OsString> = arguments.collect();
    let called = arguments.first().and_then(|name| Path::new(name).file_name());
    if called != Some(HELPER.as_ref()) {
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

pub fn run(arguments: &Mount) -> anyhow::Result<ExitCode> {
    let mut options = MountOptions::default();
    for list in &arguments.options {
        options.add(list)?;
    }
    let mount_point = mount_point(&arguments.dir)?;
    if let Some(size) = &arguments.create {
        create(&arguments.image, size)?;
    }
    let volume = absolute(&arguments.image)?;
    let directory = Directory::open().context("cannot keep a manager's socket")?;
    if arguments.foreground {
        return foreground(&directory, volume, mount_point, options, arguments.replace);
    }
    let manager = directory.connect_or_start()?;
    let replace = arguments.replace;
    told(ask(&manager, &Request::Mount { volume, mount_point, options, replace })?)
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
    let manager = directory.connect_or_start()?;
    told(ask(&manager, &Request::Mount { volume, mount_point, options, replace })?)?;
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
    path.canonicalize().with_context(|| path.display().to_string())
}

/// The directory without links, found without asking the directory itself: a mount whose
/// worker hangs must be possible to name.
pub fn mount_point(dir: &Path) -> anyhow::Result<PathBuf> {
    without_links(dir).with_context(|| dir.display().to_string())
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
        assert_eq!(helped("draconis mount -f a b"), "draconis mount -f a b");
    }
}
