//! Formatting and parsing of numbers, names, modes and times.

use std::io::{self, IsTerminal, Write};

pub use draconis_access::messages::{escape_control_chars, format_bytes};
use draconis_types::{FileType, Time};
use jiff::tz::TimeZone;
use jiff::{Timestamp, civil};

/// Parses a size for clap.
pub fn parse_size(text: &str) -> Result<u64, String> {
    draconis_service::options::parse_size(text)
        .ok_or_else(|| "not a size such as 4096, 64K or 1G".to_string())
}

/// Formats a UUID.
pub fn format_uuid(bytes: [u8; 16]) -> String {
    let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    [&hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]].join("-")
}

/// Formats a count: `1 directory`, `2 directories`.
pub fn pluralize(n: u64, one: &str, many: &str) -> String {
    format!("{n} {}", if n == 1 { one } else { many })
}

/// Formats a mode as `ls -l` does: `drwxr-xr-x`.
pub fn format_mode(mode: u32) -> String {
    let kind = match FileType::from_mode(mode) {
        Some(FileType::Directory) => 'd',
        Some(FileType::CharDevice) => 'c',
        Some(FileType::BlockDevice) => 'b',
        Some(FileType::Fifo) => 'p',
        Some(FileType::Socket) => 's',
        Some(FileType::Symlink) => 'l',
        Some(FileType::File) => '-',
        None => '?',
    };
    let mut text = String::from(kind);
    for (shift, special, set, unset) in
        [(6, 0o4000, 's', 'S'), (3, 0o2000, 's', 'S'), (0, 0o1000, 't', 'T')]
    {
        let bit = |mask, letter| if mode >> shift & mask != 0 { letter } else { '-' };
        text.push(bit(4, 'r'));
        text.push(bit(2, 'w'));
        text.push(match (mode & special != 0, mode >> shift & 1 != 0) {
            (false, true) => 'x',
            (false, false) => '-',
            (true, true) => set,
            (true, false) => unset,
        });
    }
    text
}

/// Returns the name of a file type, as `stat` shows it.
pub fn file_type_name(kind: FileType) -> &'static str {
    match kind {
        FileType::File => "regular file",
        FileType::Directory => "directory",
        FileType::CharDevice => "character special file",
        FileType::BlockDevice => "block special file",
        FileType::Fifo => "fifo",
        FileType::Socket => "socket",
        FileType::Symlink => "symbolic link",
    }
}

/// Formats times in the local time zone, which must be loaded before the process is confined.
pub struct TimeFormatter(TimeZone);

impl TimeFormatter {
    /// Loads the time zone.
    pub fn new() -> Self {
        Self(TimeZone::system())
    }

    /// Formats `2026-11-20 23:36`.
    pub fn format_to_minute(&self, time: Time) -> String {
        self.format(time, "%Y-%m-%d %H:%M")
    }

    /// Formats `2026-11-20 23:36:01.123456789 +0100`.
    pub fn format_to_nanosecond(&self, time: Time) -> String {
        self.format(time, "%Y-%m-%d %H:%M:%S.%9f %z")
    }

    /// Formats `Fri Nov 20 23:36:01 2026`, as ctime(3) does.
    pub fn format_ctime(&self, time: Time) -> String {
        self.format(time, "%a %b %e %H:%M:%S %Y")
    }

    fn format(&self, time: Time, format: &str) -> String {
        match Timestamp::new(time.seconds, time.nanoseconds as i32) {
            Ok(stamp) => stamp.to_zoned(self.0.clone()).strftime(format).to_string(),
            // Times outside the range of calendars are shown in seconds.
            Err(_) => format!("@{}", time.seconds),
        }
    }
}

/// Parses a time: `2026-11-20`, `2026-11-20 23:36:01.5`, with a time zone or in the local one, or
/// `@SECONDS`.
pub fn parse_time(text: &str) -> Result<Time, String> {
    let wrong = |_| format!("{text}: not a time such as 2026-11-20 23:36 or @1795304161");
    if let Some(seconds) = text.strip_prefix('@') {
        let (whole, fraction) = seconds.split_once('.').unwrap_or((seconds, ""));
        let seconds: i64 = whole.parse().map_err(|_| wrong(()))?;
        let digits: String = fraction.chars().chain("000000000".chars()).take(9).collect();
        let nanoseconds: u32 = digits.parse().map_err(|_| wrong(()))?;
        // The fraction counts away from zero, but nanoseconds always count forwards.
        return Ok(match (whole.starts_with('-'), nanoseconds) {
            (true, 1..) => Time { seconds: seconds - 1, nanoseconds: 1_000_000_000 - nanoseconds },
            _ => Time { seconds, nanoseconds },
        });
    }
    let stamp = text.parse::<Timestamp>().or_else(|_| {
        let local: civil::DateTime = text.parse()?;
        Ok(local.to_zoned(TimeZone::system())?.timestamp())
    });
    let stamp = stamp.map_err(|_: jiff::Error| wrong(()))?;
    let nanoseconds = stamp.as_nanosecond();
    Ok(Time {
        seconds: i64::try_from(nanoseconds.div_euclid(1_000_000_000)).map_err(|_| wrong(()))?,
        nanoseconds: u32::try_from(nanoseconds.rem_euclid(1_000_000_000)).map_err(|_| wrong(()))?,
    })
}

/// Parses a local time in digits, as tune2fs does: `20261120`, then optionally two digits each for
/// hours, minutes and seconds.
pub fn parse_compact_time(text: &str) -> Option<Time> {
    if !matches!(text.len(), 8 | 10 | 12 | 14) || !text.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    let local = civil::DateTime::strptime("%Y%m%d%H%M%S", format!("{text:0<14}")).ok()?;
    let stamp = local.to_zoned(TimeZone::system()).ok()?.timestamp();
    Some(Time { seconds: stamp.as_second(), nanoseconds: 0 })
}

/// Standard output. Names are written as they are, but escaped on a terminal: a name may contain
/// any byte but slash and NUL.
pub struct EscapingOutput {
    out: io::BufWriter<io::StdoutLock<'static>>,
    terminal: bool,
}

impl EscapingOutput {
    /// Locks standard output.
    pub fn new() -> Self {
        let out = io::stdout();
        let terminal = out.is_terminal();
        Self { out: io::BufWriter::new(out.lock()), terminal }
    }

    /// Writes a name.
    pub fn write_name(&mut self, name: &[u8]) -> io::Result<()> {
        if self.terminal {
            self.out.write_all(escape_control_chars(name).as_bytes())
        } else {
            self.out.write_all(name)
        }
    }
}

impl Write for EscapingOutput {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.out.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modes_are_formatted_as_by_ls() {
        for (bits, text) in [
            (0o040755, "drwxr-xr-x"),
            (0o100644, "-rw-r--r--"),
            (0o104755, "-rwsr-xr-x"),
            (0o102644, "-rw-r-Sr--"),
            (0o041777, "drwxrwxrwt"),
            (0o120777, "lrwxrwxrwx"),
        ] {
            assert_eq!(format_mode(bits), text);
        }
    }

    #[test]
    fn times_round_trip() {
        let at = |seconds, nanoseconds| Ok(Time { seconds, nanoseconds });
        assert_eq!(parse_time("@12"), at(12, 0));
        assert_eq!(parse_time("@-1.25"), at(-2, 750_000_000));
        assert_eq!(parse_time("1970-01-02T00:00:00.5Z"), at(86_400, 500_000_000));
        assert_eq!(parse_time("1969-12-31T23:59:59.5Z"), at(-1, 500_000_000));
        assert!(parse_time("2026-11-20").is_ok() && parse_time("2026-11-20 23:36").is_ok());
        for wrong in ["", "@", "@x", "soon", "2026-13-01", "@9223372036854775808"] {
            assert!(parse_time(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn times_outside_calendar_are_formatted_as_numbers() {
        let clock = TimeFormatter(TimeZone::UTC);
        assert_eq!(clock.format_to_minute(Time { seconds: 0, nanoseconds: 0 }), "1970-01-01 00:00");
        assert_eq!(
            clock.format_to_nanosecond(Time { seconds: -1, nanoseconds: 5 }),
            "1969-12-31 23:59:59.000000005 +0000"
        );
        assert_eq!(
            clock.format_to_minute(Time { seconds: i64::MAX, nanoseconds: 0 }),
            format!("@{}", i64::MAX)
        );
    }
}
