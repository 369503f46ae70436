//! Result of the comparison: known differences, and unexplained ones.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use crate::exact::case::TestCase;
use crate::exact::look::ResultFields;
use crate::exact::run::field_differences;

/// A field in which the mounts differ.
#[derive(Clone, Debug)]
pub struct FieldDifference {
    pub field: String,
    pub ours: String,
    pub theirs: String,
}

impl FieldDifference {
    pub fn has_values(&self, ours: &str, theirs: &str) -> bool {
        self.ours == ours && self.theirs == theirs
    }
}

/// A row of a table of known differences.
pub struct KnownDifference {
    /// Reason, in a sentence.
    pub why: &'static str,
    /// A case that shows it, which always runs.
    pub shown_by: &'static str,
    pub is: fn(&TestCase, &FieldDifference) -> bool,
}

/// A kind of unexplained difference, with the first case that showed it.
struct UnknownDifference {
    count: usize,
    example: String,
}

/// Name of a table, its rows, and the first case that showed each.
type DifferenceTable = (&'static str, &'static [KnownDifference], Vec<Option<String>>);

pub struct ComparisonVerdict {
    tables: Vec<DifferenceTable>,
    unknown: BTreeMap<(String, String, String), UnknownDifference>,
    pub compared: usize,
}

impl ComparisonVerdict {
    /// Creates a verdict with named tables.
    pub fn new(tables: &[(&'static str, &'static [KnownDifference])]) -> Self {
        let tables =
            tables.iter().map(|(name, rows)| (*name, *rows, vec![None; rows.len()])).collect();
        Self { tables, unknown: BTreeMap::new(), compared: 0 }
    }

    /// Compares the results of a case; returns true if both sides are equal, times aside.
    pub fn compare_results(
        &mut self,
        case: &TestCase,
        ours: &ResultFields,
        theirs: &ResultFields,
    ) -> bool {
        self.compared += 1;
        let mut found = field_differences(ours, theirs);
        let passing = |field: &str| field.contains("time") || field.contains(".statx");
        let same = found.iter().all(|difference| passing(&difference.field));
        // Other differences may follow from a different result: only the first one counts.
        if let Some(first) = found.iter().position(|one| one.field.starts_with("answer")) {
            found = vec![found.swap_remove(first)];
        }
        for difference in found {
            self.classify_difference(case, difference);
        }
        same
    }

    fn classify_difference(&mut self, case: &TestCase, difference: FieldDifference) {
        let mut known = false;
        for (_, rows, hits) in &mut self.tables {
            for (row, hits) in rows.iter().zip(hits) {
                if !known && (row.is)(case, &difference) {
                    hits.get_or_insert_with(|| case.to_string());
                    known = true;
                }
            }
        }
        if !known {
            let FieldDifference { field, ours, theirs } = difference;
            let example = case.to_string();
            let key = (field, shorten(&ours), shorten(&theirs));
            let unknown =
                self.unknown.entry(key).or_insert(UnknownDifference { count: 0, example });
            unknown.count += 1;
        }
    }

    pub fn count_unknown(&self) -> usize {
        self.unknown.len()
    }

    /// Lists all unexplained differences, most frequent first.
    pub fn format_report(&self) -> String {
        let mut found: Vec<_> = self.unknown.iter().collect();
        found.sort_by_key(|(_, unknown)| std::cmp::Reverse(unknown.count));
        let mut text = String::new();
        for ((field, ours, theirs), UnknownDifference { count, example }) in found {
            let _ = writeln!(text, "{count:5} × {field}: ours {ours}, the kernel's {theirs}");
            let _ = writeln!(text, "        as in: {example}");
        }
        text
    }

    /// Lists the first case that showed each row of the tables.
    pub fn examples(&self) -> String {
        let mut text = String::new();
        for (name, rows, hits) in &self.tables {
            for (row, hit) in rows.iter().zip(hits) {
                let _ = writeln!(text, "{name}: {}: {}", row.why, hit.as_deref().unwrap_or("-"));
            }
        }
        text
    }

    /// Lists the rows that no case showed.
    pub fn unused_rows(&self) -> Vec<String> {
        let mut stale = vec![];
        for (name, rows, hits) in &self.tables {
            for (row, _) in rows.iter().zip(hits).filter(|(_, hit)| hit.is_none()) {
                stale.push(format!("{name}: no case shows this any more, delete it: {}", row.why));
            }
        }
        stale
    }
}

fn shorten(value: &str) -> String {
    if value.len() <= 100 {
        value.into()
    } else {
        format!("{}…", value.chars().take(100).collect::<String>())
    }
}
