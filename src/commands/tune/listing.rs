//! Superblock listing in the format of `tune2fs -l`, for scripts that parse it.

use std::fmt::Display;
use std::io::{self, Write};

use draconis_ext::format::features::{Compatible, Incompatible, ReadOnlyCompatible};
use draconis_ext::format::superblock::{MAGIC, RawSuperblock, STATE_CLEAN, STATE_ERRORS};
use draconis_ext::tune::MOUNT_OPTIONS;
use draconis_types::Time;

use crate::text::{EscapingOutput, TimeFormatter, format_uuid};

const SECONDS_PER_DAY: u32 = 86_400;

/// User and group names of this machine, read before the process is confined.
pub struct UserGroupNames {
    users: Vec<(u32, String)>,
    groups: Vec<(u32, String)>,
}

impl UserGroupNames {
    pub fn new() -> Self {
        Self { users: read_name_file("/etc/passwd"), groups: read_name_file("/etc/group") }
    }

    fn user_name(&self, number: u32) -> &str {
        name_of_id(&self.users, number)
    }

    fn group_name(&self, number: u32) -> &str {
        name_of_id(&self.groups, number)
    }

    /// Returns the number of a user, given by name or number.
    pub fn user_number(&self, text: &str) -> Option<u32> {
        id_of_name(&self.users, text)
    }

    /// Returns the number of a group, given by name or number.
    pub fn group_number(&self, text: &str) -> Option<u32> {
        id_of_name(&self.groups, text)
    }
}

/// Parses lines of `name:…:number:…`.
fn read_name_file(path: &str) -> Vec<(u32, String)> {
    let text = std::fs::read(path).unwrap_or_default();
    let text = String::from_utf8_lossy(&text);
    let line = |line: &str| {
        let mut parts = line.split(':');
        let name = parts.next()?;
        Some((parts.nth(1)?.parse().ok()?, name.to_owned()))
    };
    text.lines().filter_map(line).collect()
}

fn name_of_id(list: &[(u32, String)], number: u32) -> &str {
    list.iter().find(|(of, _)| *of == number).map_or("unknown", |(_, name)| name)
}

fn id_of_name(list: &[(u32, String)], text: &str) -> Option<u32> {
    let found = list.iter().find(|(_, name)| name == text).map(|(number, _)| *number);
    found.or_else(|| text.parse().ok())
}

/// Writes all rows.
pub fn write(
    raw: &RawSuperblock,
    owners: &UserGroupNames,
    clock: &TimeFormatter,
    out: &mut EscapingOutput,
) -> io::Result<()> {
    let mut rows = ListingWriter { raw, clock, out };
    rows.write_identity_rows()?;
    rows.write_size_rows()?;
    rows.write_date_rows()?;
    rows.write_row(
        "Reserved blocks uid",
        format_owner(raw.s_def_resuid.get(), "user", |it| owners.user_name(it)),
    )?;
    rows.write_row(
        "Reserved blocks gid",
        format_owner(raw.s_def_resgid.get(), "group", |it| owners.group_name(it)),
    )?;
    rows.write_inode_rows()?;
    rows.write_error_rows()?;
    rows.write_optional_feature_rows()
}

fn format_owner<'a>(number: u16, what: &str, name: impl FnOnce(u32) -> &'a str) -> String {
    format!("{number} ({what} {})", name(number.into()))
}

struct ListingWriter<'a> {
    raw: &'a RawSuperblock,
    clock: &'a TimeFormatter,
    out: &'a mut EscapingOutput,
}

impl ListingWriter<'_> {
    fn write_row(&mut self, name: &str, value: impl Display) -> io::Result<()> {
        writeln!(self.out, "{:<26}{value}", format!("{name}:"))
    }

    /// Writes a row unless the value is 0.
    fn write_row_if_nonzero(&mut self, name: &str, value: impl Into<u64>) -> io::Result<()> {
        match value.into() {
            0 => Ok(()),
            value => self.write_row(name, value),
        }
    }

    fn format_date(&self, seconds: u32, high: u8) -> String {
        let seconds = i64::from(seconds) | i64::from(high) << 32;
        self.clock.format_ctime(Time { seconds, nanoseconds: 0 })
    }

    fn format_date_or(&self, seconds: u32, high: u8, none: &str) -> String {
        if (seconds, high) == (0, 0) { none.to_owned() } else { self.format_date(seconds, high) }
    }

    fn write_identity_rows(&mut self) -> io::Result<()> {
        let raw = self.raw;
        self.write_row("Filesystem volume name", field_text_or(&raw.s_volume_name, "<none>"))?;
        self.write_row("Last mounted on", field_text_or(&raw.s_last_mounted, "<not available>"))?;
        self.write_row("Filesystem UUID", format_uuid(raw.s_uuid))?;
        self.write_row("Filesystem magic number", format!("0x{MAGIC:04X}"))?;
        let revision = raw.s_rev_level.get();
        let kind = ["(original)", "(dynamic)"].get(revision as usize).unwrap_or(&"(unknown)");
        self.write_row("Filesystem revision #", format!("{revision} {kind}"))?;
        let (compatible, incompatible, read_only) = feature_flags(raw);
        let mut names = compatible.names();
        names.extend(incompatible.names());
        names.extend(read_only.names());
        self.write_row("Filesystem features", or_none(&names.join(" ")))?;
        let flags = ["signed_directory_hash", "unsigned_directory_hash", "test_filesystem"];
        let set = flags.iter().enumerate().filter(|(bit, _)| raw.s_flags.get() >> bit & 1 != 0);
        let set: String = set.map(|(_, name)| format!("{name} ")).collect();
        if raw.s_flags.get() != 0 {
            self.write_row("Filesystem flags", or_none(&set))?;
        }
        let options = default_mount_option_names(raw.s_default_mount_opts.get());
        self.write_row("Default mount options", or_none(&options.join(" ")))?;
        let text = field_text_or(&raw.s_mount_opts, "");
        if !text.is_empty() {
            self.write_row("Mount options", text)?;
        }
        let state = raw.s_state.get();
        let clean = if state & STATE_CLEAN != 0 { "clean" } else { "not clean" };
        let errors = if state & STATE_ERRORS != 0 { " with errors" } else { "" };
        self.write_row("Filesystem state", format!("{clean}{errors}"))?;
        let behaviour = match raw.s_errors.get() {
            1 => "Continue",
            2 => "Remount read-only",
            3 => "Panic",
            _ => "Unknown (continue)",
        };
        self.write_row("Errors behavior", behaviour)?;
        let systems = ["Linux", "Hurd", "Masix", "FreeBSD", "Lites"];
        let system = systems.get(raw.s_creator_os.get() as usize).unwrap_or(&"(unknown os)");
        self.write_row("Filesystem OS type", system)
    }

    fn write_size_rows(&mut self) -> io::Result<()> {
        let raw = self.raw;
        let (_, incompatible, read_only) = feature_flags(raw);
        let is_64bit = incompatible.contains(Incompatible::SIXTY_FOUR_BIT);
        let whole =
            |low: u32, high: u32| u64::from(low) | if is_64bit { u64::from(high) << 32 } else { 0 };
        let blocks = whole(raw.s_blocks_count_lo.get(), raw.s_blocks_count_hi.get());
        let reserved = whole(raw.s_r_blocks_count_lo.get(), raw.s_r_blocks_count_hi.get());
        let free = whole(raw.s_free_blocks_count_lo.get(), raw.s_free_blocks_count_hi.get());
        let unit = |log: u32| 1024_u64.checked_shl(log).unwrap_or(0);
        let block_bytes = unit(raw.s_log_block_size.get());
        let clustered = read_only.contains(ReadOnlyCompatible::BIGALLOC);
        self.write_row("Inode count", raw.s_inodes_count)?;
        self.write_row("Block count", blocks)?;
        self.write_row("Reserved block count", reserved)?;
        self.write_row_if_nonzero("Overhead clusters", raw.s_overhead_blocks.get())?;
        self.write_row("Free blocks", free)?;
        self.write_row("Free inodes", raw.s_free_inodes_count)?;
        self.write_row("First block", raw.s_first_data_block)?;
        self.write_row("Block size", block_bytes)?;
        let named = if clustered { "Cluster size" } else { "Fragment size" };
        self.write_row(named, unit(raw.s_log_cluster_size.get()))?;
        if is_64bit {
            self.write_row("Group descriptor size", raw.s_desc_size)?;
        }
        self.write_row_if_nonzero("Reserved GDT blocks", raw.s_reserved_gdt_blocks.get())?;
        self.write_row("Blocks per group", raw.s_blocks_per_group)?;
        let named = if clustered { "Clusters per group" } else { "Fragments per group" };
        self.write_row(named, raw.s_clusters_per_group)?;
        self.write_row("Inodes per group", raw.s_inodes_per_group)?;
        let table_bytes =
            u64::from(raw.s_inodes_per_group.get()) * u64::from(inode_size_bytes(raw));
        self.write_row("Inode blocks per group", table_bytes.div_ceil(block_bytes.max(1)))?;
        self.write_row_if_nonzero("First meta block group", raw.s_first_meta_bg.get())?;
        self.write_row_if_nonzero("RAID stride", raw.s_raid_stride.get())?;
        self.write_row_if_nonzero("RAID stripe width", raw.s_raid_stripe_width.get())?;
        if raw.s_log_groups_per_flex != 0 {
            let groups = 1_u64.checked_shl(raw.s_log_groups_per_flex.into()).unwrap_or(0);
            self.write_row("Flex block group size", groups)?;
        }
        Ok(())
    }

    fn write_date_rows(&mut self) -> io::Result<()> {
        let raw = self.raw;
        let made = (raw.s_mkfs_time.get(), raw.s_mkfs_time_hi);
        if made != (0, 0) {
            self.write_row("Filesystem created", self.format_date(made.0, made.1))?;
        }
        let mounted = self.format_date_or(raw.s_mtime.get(), raw.s_mtime_hi, "n/a");
        self.write_row("Last mount time", mounted)?;
        self.write_row("Last write time", self.format_date(raw.s_wtime.get(), raw.s_wtime_hi))?;
        self.write_row("Mount count", raw.s_mnt_count)?;
        self.write_row("Maximum mount count", raw.s_max_mnt_count.get().cast_signed())?;
        self.write_row(
            "Last checked",
            self.format_date(raw.s_lastcheck.get(), raw.s_lastcheck_hi),
        )?;
        let interval = raw.s_checkinterval.get();
        self.write_row("Check interval", format!("{interval} ({})", format_interval(interval)))?;
        if interval != 0 {
            let checked = i64::from(raw.s_lastcheck.get()) | i64::from(raw.s_lastcheck_hi) << 32;
            let next = Time { seconds: checked + i64::from(interval), nanoseconds: 0 };
            self.write_row("Next check after", self.clock.format_ctime(next))?;
        }
        match raw.s_kbytes_written.get() {
            0 => Ok(()),
            kib => self.write_row("Lifetime writes", format_kib(kib)),
        }
    }

    fn write_inode_rows(&mut self) -> io::Result<()> {
        let raw = self.raw;
        if raw.s_rev_level.get() >= 1 {
            self.write_row("First inode", raw.s_first_ino)?;
            writeln!(self.out, "Inode size:\t          {}", raw.s_inode_size)?;
            self.write_row_if_nonzero("Required extra isize", raw.s_min_extra_isize.get())?;
            self.write_row_if_nonzero("Desired extra isize", raw.s_want_extra_isize.get())?;
        }
        if raw.s_journal_uuid != [0; 16] {
            self.write_row("Journal UUID", format_uuid(raw.s_journal_uuid))?;
        }
        self.write_row_if_nonzero("Journal inode", raw.s_journal_inum.get())?;
        if raw.s_journal_dev != 0 {
            writeln!(self.out, "Journal device:\t          0x{:04x}", raw.s_journal_dev)?;
        }
        self.write_row_if_nonzero("First orphan inode", raw.s_last_orphan.get())?;
        let (compatible, _, _) = feature_flags(raw);
        if compatible.contains(Compatible::DIR_INDEX) || raw.s_hash_seed.iter().any(|it| *it != 0) {
            let algorithms = [
                "legacy",
                "half_md4",
                "tea",
                "legacy_unsigned",
                "half_md4_unsigned",
                "tea_unsigned",
            ];
            let number = raw.s_def_hash_version;
            let algorithm = algorithms.get(usize::from(number));
            let algorithm =
                algorithm.map_or_else(|| format!("HASHALG_{number}"), |it| it.to_string());
            self.write_row("Default directory hash", algorithm)?;
            let mut seed = [0; 16];
            for (to, word) in seed.chunks_exact_mut(4).zip(raw.s_hash_seed) {
                to.copy_from_slice(&word.to_bytes());
            }
            self.write_row("Directory Hash Seed", format_uuid(seed))?;
        }
        match raw.s_jnl_backup_type {
            0 => {}
            1 => self.write_row("Journal backup", "inode blocks")?,
            other => self.write_row("Journal backup", format!("type {other}"))?,
        }
        let [inode, id, reserved_low, reserved_high, _] = raw.s_snapshot.map(|it| it.get());
        if inode != 0 {
            self.write_row("Snapshot inode", inode)?;
            self.write_row("Snapshot ID", id)?;
            let reserved = u64::from(reserved_low) | u64::from(reserved_high) << 32;
            self.write_row("Snapshot reserved blocks", reserved)?;
        }
        Ok(())
    }

    /// Writes the rows about the first and last error that the kernel recorded.
    fn write_error_rows(&mut self) -> io::Result<()> {
        let raw = self.raw;
        self.write_row_if_nonzero("FS Error count", raw.s_error_count.get())?;
        let first = (raw.s_first_error_time.get(), raw.s_first_error_time_hi);
        if first != (0, 0) {
            self.write_row("First error time", self.format_date(first.0, first.1))?;
            self.write_row("First error function", field_text_or(&raw.s_first_error_func, ""))?;
            self.write_row("First error line #", raw.s_first_error_line)?;
            self.write_row_if_nonzero("First error inode #", raw.s_first_error_ino.get())?;
            self.write_row_if_nonzero("First error block #", raw.s_first_error_block.get())?;
        }
        let last = (raw.s_last_error_time.get(), raw.s_last_error_time_hi);
        if last != (0, 0) {
            self.write_row("Last error time", self.format_date(last.0, last.1))?;
            self.write_row("Last error function", field_text_or(&raw.s_last_error_func, ""))?;
            self.write_row("Last error line #", raw.s_last_error_line)?;
            self.write_row_if_nonzero("Last error inode #", raw.s_last_error_ino.get())?;
            self.write_row_if_nonzero("Last error block #", raw.s_last_error_block.get())?;
        }
        Ok(())
    }

    fn write_optional_feature_rows(&mut self) -> io::Result<()> {
        let raw = self.raw;
        let (_, incompatible, read_only) = feature_flags(raw);
        if incompatible.contains(Incompatible::MMP) {
            self.write_row("MMP block number", raw.s_mmp_block)?;
            self.write_row("MMP update interval", raw.s_mmp_interval)?;
        }
        self.write_row_if_nonzero("User quota inode", raw.s_usr_quota_inum.get())?;
        self.write_row_if_nonzero("Group quota inode", raw.s_grp_quota_inum.get())?;
        self.write_row_if_nonzero("Project quota inode", raw.s_prj_quota_inum.get())?;
        if read_only.contains(ReadOnlyCompatible::METADATA_CSUM) {
            self.write_row(
                "Checksum type",
                if raw.s_checksum_type == 1 { "crc32c" } else { "unknown" },
            )?;
            self.write_row("Checksum", format!("0x{:08x}", raw.s_checksum))?;
        }
        if incompatible.contains(Incompatible::CSUM_SEED) {
            self.write_row("Checksum seed", format!("0x{:08x}", raw.s_checksum_seed))?;
        }
        if incompatible.contains(Incompatible::CASEFOLD) {
            let number = raw.s_encoding.get();
            let name = ["", "utf8-12.1"].get(usize::from(number)).filter(|name| !name.is_empty());
            let name =
                name.map_or_else(|| format!("UNKNOWN_ENCODING_{number}"), |it| it.to_string());
            self.write_row("Character encoding", name)?;
        }
        self.write_row_if_nonzero("Orphan file inode", raw.s_orphan_file_inum.get())
    }
}

fn feature_flags(raw: &RawSuperblock) -> (Compatible, Incompatible, ReadOnlyCompatible) {
    let [compatible, incompatible, read_only] = raw.features();
    (
        Compatible::from_bits_retain(compatible),
        Incompatible::from_bits_retain(incompatible),
        ReadOnlyCompatible::from_bits_retain(read_only),
    )
}

fn inode_size_bytes(raw: &RawSuperblock) -> u16 {
    if raw.s_rev_level.get() == 0 { 128 } else { raw.s_inode_size.get() }
}

/// Returns the names of default mount options: the journal mode, then the flags.
fn default_mount_option_names(bits: u32) -> Vec<String> {
    const JOURNAL_MODE_MASK: u32 = 0x60;
    let known =
        |bit: u32| MOUNT_OPTIONS.iter().find(|(_, of, _)| *of == bit).map(|(name, ..)| *name);
    let journal = known(bits & JOURNAL_MODE_MASK).map(str::to_owned);
    let others = (0..32).filter(|at| bits & !JOURNAL_MODE_MASK & 1 << at != 0);
    let others =
        others.map(|at| known(1 << at).map_or_else(|| format!("MNTOPT_{at}"), str::to_owned));
    journal.into_iter().chain(others).collect()
}

/// Formats a time span: months, weeks and days, then hours, minutes and seconds.
fn format_interval(mut seconds: u32) -> String {
    if seconds == 0 {
        return "<none>".to_owned();
    }
    let mut parts = vec![];
    for (unit, name) in
        [(30 * SECONDS_PER_DAY, "month"), (7 * SECONDS_PER_DAY, "week"), (SECONDS_PER_DAY, "day")]
    {
        match seconds / unit {
            0 => {}
            1 => parts.push(format!("1 {name}")),
            many => parts.push(format!("{many} {name}s")),
        }
        seconds %= unit;
    }
    if seconds > 0 {
        let (hours, minutes) = (seconds / 3600, seconds / 60 % 60);
        parts.push(format!("{hours}:{minutes:02}:{:02}", seconds % 60));
    }
    parts.join(", ")
}

/// Formats KiB in the smallest unit in which the number is below 8192.
fn format_kib(kib: u64) -> String {
    let mut amount = kib;
    let mut rest = 0;
    for unit in ["kB", "MB", "GB", "TB"] {
        if amount < 8192 {
            return format!("{} {unit}", amount + rest);
        }
        // Rounds half up.
        rest = amount >> 9 & 1;
        amount >>= 10;
    }
    format!("{} PB", amount + rest)
}

/// Returns a text field up to its first NUL, or `none` if it is empty.
fn field_text_or(field: &[u8], none: &str) -> String {
    let len = field.iter().position(|byte| *byte == 0).unwrap_or(field.len());
    match &field[..len] {
        [] => none.to_owned(),
        text => crate::text::escape_control_chars(text),
    }
}

fn or_none(text: &str) -> &str {
    if text.is_empty() { "(none)" } else { text }
}
