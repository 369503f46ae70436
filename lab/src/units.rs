//! Formatting and parsing of sizes, times and rates.

use draconis_service::options::parse_size;

/// Parses a decimal number with an optional unit of size: `4096`, `16K`, `1.5KiB`. Rounds
/// down.
pub fn parse_amount(text: &str) -> Option<u64> {
    let text = text.trim();
    let number = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let unit = parse_size(&format!("1{}", &text[number.len()..]))?;
    let number: f64 = number.parse().ok()?;
    (number >= 0.0).then_some((number * unit as f64) as u64)
}

/// Formats a size: `4 KiB`, `1.5 MiB`.
pub fn format_bytes(bytes: f64) -> String {
    // A user who chose 6000 should not see 5.86 KiB.
    if bytes < 1e4 && bytes % 512.0 != 0.0 {
        return format!("{} B", format_significant(bytes));
    }
    format_scaled(bytes, 1024.0, &["B", "KiB", "MiB", "GiB", "TiB"])
}

/// Formats a size as short as possible, for axes: `4K`.
pub fn format_bytes_short(bytes: f64) -> String {
    format_scaled(bytes, 1024.0, &["", "K", "M", "G", "T"]).replace(' ', "")
}

/// Formats a time: `12 µs`.
pub fn format_time_ns(ns: f64) -> String {
    format_scaled(ns, 1000.0, &["ns", "µs", "ms", "s"])
}

/// Formats a duration: `40 s`, `12 min`, `1.5 h`.
pub fn format_duration(seconds: u64) -> String {
    match seconds {
        0..100 => format!("{seconds} s"),
        100..5400 => format!("{} min", (seconds + 30) / 60),
        _ => format!("{} h", format_significant((seconds as f64 / 360.0).round() / 10.0)),
    }
}

/// Formats a count in words: `seven`; in digits beyond ten.
pub fn count_in_words(count: usize) -> String {
    const WORDS: [&str; 11] =
        ["no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"];
    WORDS.get(count).map_or_else(|| count.to_string(), |word| (*word).to_string())
}

/// Formats a count: `3.2 M`.
pub fn format_count(count: f64) -> String {
    format_scaled(count, 1000.0, &["", "K", "M", "G", "T"]).trim_end().to_string()
}

fn format_scaled(value: f64, step: f64, units: &[&str]) -> String {
    let (mut value, mut nth) = (value, 0);
    while value.abs() >= step && nth + 1 < units.len() {
        value /= step;
        nth += 1;
    }
    format!("{} {}", format_significant(value), units[nth])
}

/// Formats three significant digits, without trailing zeros.
pub fn format_significant(value: f64) -> String {
    if value == 0.0 || !value.is_finite() {
        return "0".into();
    }
    if value.abs() >= 1e4 {
        let unit = 10f64.powf(value.abs().log10().floor() - 2.0);
        return format_grouped((value / unit).round() * unit);
    }
    let decimals = (2 - value.abs().log10().floor() as i32).max(0);
    let text = format!("{value:.*}", decimals as usize);
    if text.contains('.') {
        text.trim_end_matches('0').trim_end_matches('.').to_string()
    } else {
        text
    }
}

/// Formats a whole number in groups of three digits.
fn format_grouped(value: f64) -> String {
    let digits = format!("{:.0}", value.abs());
    let mut text = String::from(if value < 0.0 { "-" } else { "" });
    for (nth, digit) in digits.chars().enumerate() {
        if nth > 0 && (digits.len() - nth) % 3 == 0 {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// Formats a value in the unit of a figure.
pub fn format_in_unit(value: f64, unit: &str) -> String {
    match unit {
        "B" => format_bytes(value),
        "ns" => format_time_ns(value),
        "B/s" => format!("{}/s", format_scaled(value, 1000.0, &["B", "kB", "MB", "GB", "TB"])),
        "/s" => format!("{}/s", format_count(value)),
        "%" => format!("{} %", format_significant(value)),
        "" => format_count(value),
        other => format!("{} {other}", format_count(value)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn amounts_parse_and_format() {
        assert_eq!(parse_amount("4K"), Some(4096));
        assert_eq!(parse_amount("350M"), Some(350 << 20));
        assert_eq!(parse_amount("1.5KiB"), Some(1536));
        assert_eq!(parse_amount("x"), None);
        assert_eq!(format_bytes(1536.0), "1.5 KiB");
        assert_eq!(format_time_ns(12_345.0), "12.3 µs");
        assert_eq!((format_duration(40), format_duration(720)), ("40 s".into(), "12 min".into()));
        assert_eq!(format_duration(5400), "1.5 h");
        assert_eq!(format_significant(0.00123), "0.00123");
        assert_eq!(format_significant(1234.0), "1234");
        assert_eq!(format_significant(294_577.0), "295,000");
        assert_eq!(format_bytes(6000.0), "6000 B");
        assert_eq!(format_in_unit(34e6, "B/s"), "34 MB/s");
        assert_eq!(format_bytes_short(65536.0), "64K");
    }
}
