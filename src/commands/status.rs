//! `draconis status`

use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::bail;
use clap::Args;
use draconis_service::client::{RuntimeDir, request_if_running};
use draconis_service::export_status::{ExportProcess, list_exports};
use draconis_service::mount_table;
use draconis_service::protocol::{CacheStatus, LostMount, MountStatus, Reply, Request, Status};
use draconis_service::remote_disk::UNSENT_PREFIX;
use draconis_types::path_bytes::ShowPath;

use super::mount::resolve_mount_point;
use crate::report;
use crate::text::{escape_control_chars, format_bytes};

/// Show mounts and exports: worker, sandbox, caches, requests, memory, clients.
#[derive(Debug, Args)]
pub struct Arguments {
    /// Print JSON: an object with lists `mounts` and `exports`. A path that is not UTF-8 also has a
    /// member NAME_hex, with all bytes in hexadecimal.
    #[arg(long)]
    json: bool,
    /// Show only mounts at or below these directories, and no exports.
    #[arg(value_name = "DIR")]
    dirs: Vec<PathBuf>,
}

pub fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let dirs = arguments.dirs.iter().map(|dir| resolve_mount_point(dir));
    let dirs: Vec<_> = dirs.collect::<Result<_, _>>()?;
    let is_shown = |at: &Path| dirs.is_empty() || dirs.iter().any(|dir| at.starts_with(dir));
    let directory = RuntimeDir::open()?;
    let mut status = match request_if_running(&directory, &Request::Status)? {
        Some(Reply::Status(status)) => status,
        Some(Reply::Failed { why }) => bail!("{why}"),
        Some(_) => bail!("the manager answered something else; is it another version?"),
        // Without a manager there are no mounts.
        None => Status::default(),
    };
    status.mounts.retain(|mount| is_shown(&mount.mount_point));
    status.other_namespaces.retain(|mount| is_shown(&mount.mount_point));
    status.lost.retain(|lost| is_shown(&lost.mount_point));
    status.dead = mounts_without_keeper(&status.mounts, is_shown);
    // An export is at no directory.
    status.exports = if dirs.is_empty() { list_exports(&directory)? } else { vec![] };
    if arguments.json {
        report::print_line(serde_json::to_string_pretty(&status)?)?;
    } else if [&status.mounts, &status.other_namespaces].iter().all(|mounts| mounts.is_empty())
        && status.dead.is_empty()
        && status.exports.is_empty()
    {
        report::print_line(match dirs.is_empty() {
            true => "nothing is mounted",
            false => "nothing is mounted there",
        })?;
    }
    if !arguments.json {
        for mount in &status.mounts {
            report::print_line(format_mount(mount).trim_end())?;
        }
        for mount in &status.other_namespaces {
            report::print_line(format_mount(mount).trim_end())?;
            report::print_line(format_args!(
                "  namespace another one, of process {0}: nsenter -t {0} -m",
                mount.keeper_pid
            ))?;
        }
        for dead in &status.dead {
            report::print_line(
                format_dead_mount(&dead.volume, &dead.mount_point, &dead.why).trim_end(),
            )?;
        }
        for lost in &status.lost {
            let (volume, at) = (lost.volume.shown(), lost.mount_point.shown());
            report::print_line(format_args!("{volume} was on {at}\n  lost      {}", lost.why))?;
        }
        for process in &status.exports {
            report::print_line(format_exports(process).trim_end())?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Returns this user's dead mounts that have lost their keeper, and are on a mount point that
/// `is_shown` accepts. The others get no request.
fn mounts_without_keeper(
    known: &[MountStatus],
    is_shown: impl Fn(&Path) -> bool,
) -> Vec<LostMount> {
    let is_skipped = |entry: &mount_table::MountEntry| {
        !is_shown(&entry.mount_point)
            || known.iter().any(|mount| mount.mount_point == entry.mount_point)
    };
    let dead = mount_table::find_dead_mounts(rustix::process::geteuid(), is_skipped).into_iter();
    dead.map(|entry| LostMount {
        volume: entry.volume(),
        why: "its keeper is gone".into(),
        mount_point: entry.mount_point,
    })
    .collect()
}

fn format_dead_mount(volume: &Path, mount_point: &Path, why: &str) -> String {
    let (volume, at) = (volume.shown(), mount_point.shown());
    format!("{volume} on {at}\n  dead      {why}; clear it with draconis umount\n")
}

/// Clones of an export that are named.
const SHOWN_CLONES: usize = 8;

fn format_exports(process: &ExportProcess) -> String {
    let ExportProcess { pid, exports, sandbox, why } = process;
    if let Some(why) = why {
        return format!("an export\n  process   {pid}: {why}\n");
    }
    let mut text = String::new();
    for export in exports {
        let shown = |text: &str| escape_control_chars(text.as_bytes()).to_string();
        let sockets =
            export.vhost_user_socket.iter().map(|path| format!("vhost-user {}", path.shown()));
        let addresses: Vec<_> = export.uris.iter().cloned().chain(sockets).collect();
        text += &format!(
            "{} exported at {}\n  process   {pid}, landlock {}, seccomp {}\n  clients   {}{}, {} requests, {} read, {} written\n",
            escape_control_chars(export.image.as_os_str().as_bytes()),
            shown(&addresses.join(" and ")),
            sandbox.landlock,
            if sandbox.seccomp { "kills" } else { "off" },
            export.clients,
            if export.read_only { ", read-only" } else { "" },
            export.requests,
            format_bytes(export.read_bytes),
            format_bytes(export.written_bytes),
        );
        if !export.clones.is_empty() {
            let named: Vec<_> =
                export.clones.iter().take(SHOWN_CLONES).map(|it| shown(it)).collect();
            let more = export.clones.len() - named.len();
            let more = if more > 0 { format!(" and {more} more") } else { String::new() };
            text += &format!("  clones    {}{more}\n", named.join(", "));
        }
        if let Some(error) = &export.last_error {
            text += &format!("  error     {}\n", shown(error));
        }
    }
    text
}

fn format_mount(mount: &MountStatus) -> String {
    if let Some(why) = &mount.why {
        return format_dead_mount(&mount.volume, &mount.mount_point, why);
    }
    let sandbox = &mount.sandbox;
    let mut text = format!(
        "{} on {}\n  worker    {} ({}{}), {} resident\n  sandbox   landlock {}, seccomp {}, {}\n",
        mount.volume.shown(),
        mount.mount_point.shown(),
        mount.worker_pid,
        mount.state,
        if mount.read_only { ", read-only" } else { "" },
        format_bytes(mount.memory_bytes),
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
        text += &match why.strip_prefix(UNSENT_PREFIX) {
            Some(what) => format!("  waits     {what}\n"),
            None => format!("  stopped   nothing is written any more: {why}\n"),
        };
    }
    if !mount.copies.is_empty() {
        text += &format!("  copies    unmounted here, goes on in {}\n", mount.copies.join(", "));
    }
    if mount.misses_syncs {
        text +=
            "  syncs     fsync alone: the kernel passes sync and syncfs on to mounts of root's\n";
    }
    text += &format_notes(mount);
    if let Some(worker) = &mount.worker {
        for what in &worker.refused {
            text += &format!("  refused   {what}: workers died over it\n");
        }
        text += &format!(
            "  requests  {} from the kernel, {} of the device ({})\n",
            worker.requests,
            worker.device_reads,
            format_bytes(worker.device_read_bytes)
        );
        for cache in &worker.caches {
            text += &format_cache(cache);
        }
    }
    text
}

/// Returns notes about the volume, and why a mount is read-only.
fn format_notes(mount: &MountStatus) -> String {
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

fn format_cache(cache: &CacheStatus) -> String {
    let amount = |n| if cache.name == "data" { format_bytes(n) } else { n.to_string() };
    format!(
        "  cache     {:<9} {} of {} used, {:.1} % of {} found\n",
        cache.name,
        amount(cache.used),
        amount(cache.capacity),
        cache.hit_rate * 100.0,
        cache.hits + cache.misses
    )
}
