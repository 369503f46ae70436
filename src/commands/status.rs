//! `draconis status`

use std::path::Path;
use std::process::ExitCode;

use anyhow::bail;
use clap::Args;
use draconis_service::client::{Directory, ask_running};
use draconis_service::elsewhere::WAITING;
use draconis_service::protocol::{CacheStatus, LostMount, MountStatus, Reply, Request, Status};
use draconis_service::table;

use crate::say;
use crate::text::bytes;

/// Show mounts: worker, sandbox, caches, requests, memory.
#[derive(Debug, Args)]
pub struct Arguments {
    /// Print JSON: an object with a list `mounts`.
    #[arg(long)]
    json: bool,
}

pub fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let mut status = match ask_running(&Directory::open()?, &Request::Status)? {
        Some(Reply::Status(status)) => status,
        Some(Reply::Failed { why }) => bail!("{why}"),
        Some(_) => bail!("the manager answered something else; is it another version?"),
        // No manager, no mounts: that is an answer, too.
        None => Status::default(),
    };
    status.dead = orphaned(&status.mounts);
    if arguments.json {
        say::print_line(serde_json::to_string_pretty(&status)?)?;
    } else if status.mounts.is_empty() && status.dead.is_empty() {
        say::print_line("nothing is mounted")?;
    }
    if !arguments.json {
        for mount in &status.mounts {
            say::print_line(shown(mount).trim_end())?;
        }
        for dead in &status.dead {
            say::print_line(shown_dead(&dead.volume, &dead.mount_point, &dead.why).trim_end())?;
        }
        for lost in &status.lost {
            let (volume, at) = (lost.volume.display(), lost.mount_point.display());
            say::print_line(format_args!("{volume} was on {at}\n  lost      {}", lost.why))?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Dead mounts of this user that no keeper knows: they outlived theirs.
fn orphaned(known: &[MountStatus]) -> Vec<LostMount> {
    let is_known = |entry: &table::Entry| known.iter().any(|mount| mount.mount_point == entry.at);
    let dead = table::dead(rustix::process::geteuid(), is_known).into_iter();
    dead.map(|entry| LostMount {
        volume: entry.volume(),
        why: "its keeper is gone".into(),
        mount_point: entry.at,
    })
    .collect()
}

fn shown_dead(volume: &Path, mount_point: &Path, why: &str) -> String {
    let (volume, at) = (volume.display(), mount_point.display());
    format!("{volume} on {at}\n  dead      {why}; clear it with draconis umount\n")
}

fn shown(mount: &MountStatus) -> String {
    if let Some(why) = &mount.why {
        return shown_dead(&mount.volume, &mount.mount_point, why);
    }
    let sandbox = &mount.sandbox;
    let mut text = format!(
        "{} on {}\n  worker    {} ({}{}), {} resident\n  sandbox   landlock {}, seccomp {}, {}\n",
        mount.volume.display(),
        mount.mount_point.display(),
        mount.worker_pid,
        mount.state,
        if mount.read_only { ", read-only" } else { "" },
        bytes(mount.memory_bytes),
        sandbox.landlock,
        if sandbox.seccomp { "kills" } else { "off" },
        if sandbox.no_capabilities { "no capabilities" } else { "some capabilities" },
    );
    match mount.restarts {
        0 => {}
        1 => text += "  restarts  1: a worker died, and this one took over\n",
        many => text += &format!("  restarts  {many}: workers died, and others took over\n"),
    }
    if mount.restarts > 0 && !mount.resends {
        text += "            calls under way got an error each time: this needs Linux 6.9\n";
    }
    let failure = || mount.worker.as_ref().and_then(|worker| worker.failure.as_ref());
    if let Some(why) = mount.disk.as_ref().or_else(failure) {
        text += &match why.strip_prefix(WAITING) {
            Some(what) => format!("  waits     {what}\n"),
            None => format!("  stopped   nothing is written any more: {why}\n"),
        };
    }
    if mount.misses_syncs {
        text +=
            "  syncs     fsync alone: the kernel passes sync and syncfs on to mounts of root's\n";
    }
    text += &shown_notes(mount);
    if let Some(worker) = &mount.worker {
        for what in &worker.refused {
            text += &format!("  refused   {what}: workers died over it\n");
        }
        text += &format!(
            "  requests  {} from the kernel, {} of the device ({})\n",
            worker.requests,
            worker.device_reads,
            bytes(worker.device_read_bytes)
        );
        for cache in &worker.caches {
            text += &shown_cache(cache);
        }
    }
    text
}

/// What the user should know about the volume, and why a mount is read-only.
fn shown_notes(mount: &MountStatus) -> String {
    let Some(worker) = &mount.worker else { return String::new() };
    let mut text: String =
        worker.notes.iter().map(|note| format!("  note      {note}\n")).collect();
    let says_why = mount.disk.is_some()
        || worker.failure.is_some()
        || worker.notes.iter().any(|note| note.starts_with("read-only"));
    if mount.read_only && !says_why {
        text += "  note      read-only: it was mounted so, or remounted\n";
    }
    text
}

fn shown_cache(cache: &CacheStatus) -> String {
    let amount = |n| if cache.name == "data" { bytes(n) } else { n.to_string() };
    format!(
        "  cache     {:<9} {} of {} used, {:.1} % of {} found\n",
        cache.name,
        amount(cache.used),
        amount(cache.capacity),
        cache.hit_rate * 100.0,
        cache.hits + cache.misses
    )
}
