//! `draconis tune`
//!
//! ```text
//!   image ──exclusive──▶ confined ──▶ recovered ──▶ tuned ──▶ listed (-l)
//! ```

mod listing;

use std::ffi::OsString;
use std::io::Write;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::{Context, anyhow, bail};
use clap::{Args, ValueEnum};
use draconis_access::tuning::tune;
use draconis_access::uuid::{self, UuidGenerator};
use draconis_device::Disk;
use draconis_ext::format::quota::QuotaType;
use draconis_ext::tune::{Reserved, TuneChanges, superblock};
use draconis_service::volume::locate_for_writing;
use draconis_types::Time;
use draconis_types::path_bytes::ShowPath;

use crate::edit;
use crate::image::{self, BackingFiles, WriteArgs};
use crate::interrupt;
use crate::text::{EscapingOutput, TimeFormatter};
use listing::UserGroupNames;

/// Kernel behaviour on errors.
#[derive(Debug, Clone, Copy, ValueEnum)]
enum ErrorBehaviour {
    Continue,
    RemountRo,
    Panic,
}

/// Change superblock settings: label, UUID, reserved blocks, features, journal.
///
/// Options are those of tune2fs. Before a change of more than the superblock the volume is checked,
/// and refused if it is damaged. Without options, completes an interrupted grow, shrink or tune.
/// With -l alone the volume is only read; `draconis info` prints a summary.
#[derive(Debug, Args)]
pub struct Arguments {
    /// Where the volume is.
    #[command(flatten)]
    place: WriteArgs,
    /// Print the superblock in the format of tune2fs -l.
    #[arg(short = 'l')]
    list: bool,
    /// Label, at most 16 bytes.
    #[arg(short = 'L', value_name = "LABEL")]
    label: Option<OsString>,
    /// UUID, or random, time, clear.
    #[arg(short = 'U', value_name = "UUID")]
    uuid: Option<String>,
    /// Percentage of blocks reserved for the superuser.
    #[arg(short = 'm', value_name = "PERCENT")]
    reserved_percent: Option<f64>,
    /// Number of blocks reserved for the superuser.
    #[arg(short = 'r', value_name = "BLOCKS", conflicts_with = "reserved_percent")]
    reserved_blocks: Option<u64>,
    /// Enable features, or disable them with ^, comma-separated.
    #[arg(short = 'O', value_name = "[^]FEATURE,..", value_delimiter = ',')]
    features: Vec<String>,
    /// Enable quota tracking (usrquota, grpquota, prjquota), or disable it with ^,
    /// comma-separated.
    #[arg(short = 'Q', value_name = "[^]KIND,..", value_delimiter = ',')]
    quotas: Vec<String>,
    /// Add a journal, as -O has_journal.
    #[arg(short = 'j')]
    journal: bool,
    /// Journal options: size=MIB.
    #[arg(short = 'J', value_name = "size=MIB")]
    journal_options: Option<String>,
    /// User that may use reserved blocks.
    #[arg(short = 'u', value_name = "USER")]
    reserved_user: Option<String>,
    /// Group that may use reserved blocks.
    #[arg(short = 'g', value_name = "GROUP")]
    reserved_group: Option<String>,
    /// Set default mount options (acl, user_xattr, journal_data_ordered, nobarrier, discard and
    /// others), or clear them with ^, comma-separated.
    #[arg(short = 'o', value_name = "[^]OPTION,..", value_delimiter = ',')]
    mount_options: Vec<String>,
    /// Set the last-mounted directory.
    #[arg(short = 'M', value_name = "DIR")]
    last_mounted: Option<OsString>,
    /// Extended options, comma-separated.
    ///
    /// mmp_update_interval=SECONDS: MMP update interval; clear_mmp: reset a stale MMP block;
    /// stride=BLOCKS: RAID chunk size; stripe_width=BLOCKS: RAID stripe size;
    /// hash_alg=legacy|half_md4|tea: hash of new directory indexes; mount_opts=TEXT: options for the
    /// kernel; force_fsck: request a full check; [^]test_fs.
    #[arg(short = 'E', value_name = "OPTIONS", value_delimiter = ',')]
    extended: Vec<String>,
    /// Kernel behaviour on errors.
    #[arg(short = 'e', value_name = "BEHAVIOUR", value_enum)]
    errors: Option<ErrorBehaviour>,
    /// Maximum mounts between checks (0 or -1: none).
    #[arg(short = 'c', value_name = "MOUNTS", allow_hyphen_values = true)]
    most_mounts: Option<i32>,
    /// Set the mount count.
    #[arg(short = 'C', value_name = "MOUNTS")]
    mounts: Option<u16>,
    /// Set the time of the last check: now, `YYYYMMDD[HH[MM[SS]]]`, or a time such as 2026-11-20 23:36.
    #[arg(short = 'T', value_name = "TIME")]
    checked: Option<String>,
    /// Maximum time between checks: days, or with a suffix d, w, m (0: none).
    #[arg(short = 'i', value_name = "TIME")]
    interval: Option<String>,
    /// Image: file, block device or STORE#NAME.
    image: PathBuf,
}

pub fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let owners = UserGroupNames::new();
    let clock = TimeFormatter::new();
    let now = edit::now_or_source_date()?;
    let changes = changes_from_arguments(arguments, &owners, now)?;
    let clears = arguments.extended.iter().any(|option| option == "clear_mmp");
    let disk = match arguments.list && !clears && changes.is_empty() {
        true => image::open_disk_confined(&arguments.image, &arguments.place, None)?,
        false => apply_changes(arguments, &changes, clears, now)?,
    };
    if arguments.list {
        let raw = superblock(&*disk);
        let raw =
            raw.map_err(|error| image::open_volume_error(&arguments.image, &*disk, error.into()))?;
        let mut out = EscapingOutput::new();
        listing::write(&raw, &owners, &clock, &mut out)?;
        out.flush()?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Changes the volume; returns its disk.
fn apply_changes(
    arguments: &Arguments,
    changes: &TuneChanges,
    clears: bool,
    now: Time,
) -> anyhow::Result<Arc<dyn Disk>> {
    let shown = arguments.image.shown();
    let opened = image::open_writable(&arguments.image, arguments.place.force)?;
    let behind = BackingFiles::open(&arguments.image, &arguments.place.backing)?;
    image::confine_to_open_files()?;
    interrupt::watch();
    let part =
        locate_for_writing(opened.into_disk()?, &behind.start_disks(), &arguments.place.options());
    let disk = part.with_context(|| shown.to_string())?.disk;
    if clears {
        image::clear_mmp(&arguments.image, &disk, now)?;
    }
    tune(&arguments.image, &disk, changes, now)?;
    Ok(disk)
}

fn changes_from_arguments(
    arguments: &Arguments,
    owners: &UserGroupNames,
    now: Time,
) -> anyhow::Result<TuneChanges> {
    let mut identities = UuidGenerator::new(None);
    let uuid = match arguments.uuid.as_deref() {
        None => None,
        Some("random" | "time") => Some(identities.uuid()),
        Some("clear") => Some([0; 16]),
        Some(text) => Some(
            uuid::parse(text)
                .with_context(|| format!("-U {text}: a UUID, random, time or clear is needed"))?,
        ),
    };
    let reserved = match (arguments.reserved_percent, arguments.reserved_blocks) {
        (Some(percent), _) if (0.0..=50.0).contains(&percent) => {
            Some(Reserved::Ppm((percent * 10_000.0).round() as u32))
        }
        (Some(percent), _) => return Err(anyhow!("-m {percent}: 0 to 50 percent are possible")),
        (None, blocks) => blocks.map(Reserved::Blocks),
    };
    let mut features = arguments.features.clone();
    if arguments.journal || arguments.journal_options.is_some() {
        features.push("has_journal".to_owned());
    }
    let size = |text: &str| {
        let mib = text.strip_prefix("size=").and_then(|mib| mib.parse::<u32>().ok());
        mib.with_context(|| format!("-J {text}: size=MIB is possible"))
    };
    let most_mounts = arguments.most_mounts.map(|mounts| match mounts {
        -1 | 0 => Ok(0),
        mounts => u16::try_from(mounts)
            .ok()
            .filter(|it| *it <= 0x7FFF)
            .with_context(|| format!("-c {mounts}: -1 to 32767 mounts are possible")),
    });
    let user = |text: &String| {
        owners.user_number(text).with_context(|| format!("-u {text}: there is no such user"))
    };
    let group = |text: &String| {
        owners.group_number(text).with_context(|| format!("-g {text}: there is no such group"))
    };
    let mut changes = TuneChanges {
        label: arguments.label.as_ref().map(|label| label.as_bytes().to_vec()),
        uuid,
        reserved,
        errors: arguments.errors.map(|errors| errors as u16 + 1),
        max_mounts: most_mounts.transpose()?,
        interval_seconds: arguments.interval.as_deref().map(parse_check_interval).transpose()?,
        features,
        quotas: arguments
            .quotas
            .iter()
            .map(|word| parse_quota_option(word))
            .collect::<anyhow::Result<_>>()?,
        mounts: arguments.mounts,
        checked: arguments
            .checked
            .as_deref()
            .map(|text| parse_last_check_time(text, now))
            .transpose()?,
        reserved_user: arguments.reserved_user.as_ref().map(user).transpose()?,
        reserved_group: arguments.reserved_group.as_ref().map(group).transpose()?,
        last_mounted: arguments.last_mounted.as_ref().map(|path| path.as_bytes().to_vec()),
        mount_options: arguments.mount_options.clone(),
        journal_mib: arguments.journal_options.as_deref().map(size).transpose()?,
        hash_seed: identities.uuid(),
        ..TuneChanges::default()
    };
    apply_extended_options(&arguments.extended, &mut changes)?;
    Ok(changes)
}

/// Parses a quota type, and `^` to disable it.
fn parse_quota_option(word: &str) -> anyhow::Result<(QuotaType, bool)> {
    let (name, is_counted) = word.strip_prefix('^').map_or((word, true), |name| (name, false));
    let kind = match name {
        "usrquota" => QuotaType::User,
        "grpquota" => QuotaType::Group,
        "prjquota" => QuotaType::Project,
        _ => bail!("-Q {word}: usrquota, grpquota and prjquota are possible"),
    };
    Ok((kind, is_counted))
}

/// Applies the options of `-E`.
fn apply_extended_options(options: &[String], changes: &mut TuneChanges) -> anyhow::Result<()> {
    for option in options {
        let number = |text: &str| {
            text.parse::<u32>().with_context(|| format!("-E {option}: a number is needed"))
        };
        match option.split_once('=').unwrap_or((option, "")) {
            ("clear_mmp", "") => {}
            ("force_fsck", "") => changes.force_check = true,
            ("test_fs", "") => changes.is_test_filesystem = Some(true),
            ("^test_fs", "") => changes.is_test_filesystem = Some(false),
            ("mmp_update_interval", text) => {
                let seconds = u16::try_from(number(text)?);
                changes.mmp_interval =
                    Some(seconds.with_context(|| format!("-E {option}: seconds are needed"))?);
            }
            ("stride", text) => {
                let blocks = u16::try_from(number(text)?);
                changes.raid_stride =
                    Some(blocks.with_context(|| format!("-E {option}: at most 65535 blocks"))?);
            }
            ("stripe_width" | "stripe-width", text) => {
                changes.raid_stripe_blocks = Some(number(text)?);
            }
            ("mount_opts", text) => changes.mount_options_text = Some(text.as_bytes().to_vec()),
            ("hash_alg", text) => {
                let known = ["legacy", "half_md4", "tea"];
                let at = known.iter().position(|name| *name == text);
                let at = at.with_context(|| format!("-E {option}: legacy, half_md4 or tea"))?;
                changes.hash_algorithm = Some(at as u8);
            }
            _ => bail!(
                "-E {option}: mmp_update_interval=, clear_mmp, stride=, stripe_width=, hash_alg=, \
                 mount_opts=, force_fsck and [^]test_fs are possible"
            ),
        }
    }
    Ok(())
}

/// Parses the time of the last check, in seconds.
fn parse_last_check_time(text: &str, now: Time) -> anyhow::Result<u64> {
    let time = match text {
        "now" => now,
        text => crate::text::parse_compact_time(text)
            .map_or_else(|| crate::text::parse_time(text), Ok)
            .map_err(|_| {
                anyhow!("-T {text}: now, YYYYMMDD[HH[MM[SS]]] or a time such as 2026-11-20 23:36")
            })?,
    };
    u64::try_from(time.seconds).with_context(|| format!("-T {text}: a time since 1970 is needed"))
}

/// Parses days, weeks or months, in seconds.
fn parse_check_interval(text: &str) -> anyhow::Result<u32> {
    const SECONDS_PER_DAY: u32 = 86_400;
    let (number, unit) = match text.char_indices().last() {
        Some((at, 'd' | 'D')) => (&text[..at], SECONDS_PER_DAY),
        Some((at, 'w' | 'W')) => (&text[..at], 7 * SECONDS_PER_DAY),
        Some((at, 'm' | 'M')) => (&text[..at], 30 * SECONDS_PER_DAY),
        Some((at, 's' | 'S')) => (&text[..at], 1),
        _ => (text, SECONDS_PER_DAY),
    };
    let seconds = number.parse::<u32>().ok().and_then(|number| number.checked_mul(unit));
    seconds.with_context(|| format!("-i {text}: a time such as 30d, 4w or 6m is needed"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_parsed_as_by_tune2fs() {
        let seconds = |text| parse_check_interval(text).ok();
        assert_eq!(
            [seconds("0"), seconds("2"), seconds("2d")],
            [Some(0), Some(172_800), Some(172_800)]
        );
        assert_eq!([seconds("1w"), seconds("1m")], [Some(604_800), Some(2_592_000)]);
        assert_eq!([seconds("x"), seconds(""), seconds("99999999w")], [None; 3]);
    }
}
