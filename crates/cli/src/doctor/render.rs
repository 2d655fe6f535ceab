//! The diagnosis as an aligned table.

use std::fmt::Write;

use anstyle::{AnsiColor, Style};

use super::{Check, Diagnosis, Status};

/// Values longer than this push their note to the next line instead of moving the column for all.
const WIDEST_VALUE: usize = 34;

/// One line for each check that is ok, two for what needs attention, and a verdict.
pub(super) fn text(diagnosis: &Diagnosis, colored: bool) -> String {
    let mut text = String::new();
    let columns = Columns::fit(&diagnosis.checks);
    let bold = style(Style::new().bold(), colored);
    let mut section = "";
    for check in &diagnosis.checks {
        if check.section != section {
            let gap = if section.is_empty() { "" } else { "\n" };
            section = check.section;
            let _ = writeln!(text, "{gap}{bold}{section}{bold:#}"); // a String takes all, here and below
        }
        line(&mut text, check, columns, colored);
    }
    let _ = writeln!(text, "\n{bold}{}{bold:#}", verdict(diagnosis));
    text
}

#[derive(Clone, Copy)]
struct Columns {
    name: usize,
    value: usize,
}

impl Columns {
    fn fit(checks: &[Check]) -> Self {
        let name = checks.iter().map(|check| check.name.chars().count()).max().unwrap_or(0);
        let values = checks.iter().map(|check| check.value.chars().count());
        let value = values.filter(|&width| width <= WIDEST_VALUE).max().unwrap_or(0);
        Self { name, value }
    }
}

fn line(text: &mut String, check: &Check, columns: Columns, colored: bool) {
    let Columns { name, value } = columns;
    let mark = style(mark(check.status), colored);
    let dim = style(Style::new().dimmed(), colored);
    let (word, note) = (word(check.status), &check.note);
    let _ = write!(text, "  {mark}{word:<7}{mark:#}  {:<name$}  ", check.name);
    if check.status == Status::Ok && check.value.chars().count() <= value {
        let _ = writeln!(text, "{:<value$}  {dim}{note}{dim:#}", check.value);
    } else {
        let _ = writeln!(text, "{}", check.value);
        let _ = writeln!(text, "{:indent$}{dim}{note}{dim:#}", "", indent = 2 + 7 + 2 + name + 2);
    }
}

fn word(status: Status) -> &'static str {
    match status {
        Status::Ok => "ok",
        Status::Warning => "warning",
        Status::Missing => "missing",
    }
}

fn mark(status: Status) -> Style {
    match status {
        Status::Ok => AnsiColor::Green.on_default(),
        Status::Warning => AnsiColor::Yellow.on_default().bold(),
        Status::Missing => AnsiColor::Red.on_default().bold(),
    }
}

fn style(style: Style, colored: bool) -> Style {
    if colored { style } else { Style::new() }
}

fn verdict(diagnosis: &Diagnosis) -> String {
    let count = |status| diagnosis.checks.iter().filter(|check| check.status == status).count();
    let lacking = diagnosis.checks.iter().filter(|check| check.required && check.status == Status::Missing);
    let lacking: Vec<&str> = lacking.map(|check| &*check.name).collect();
    let warnings = match count(Status::Warning) {
        0 => String::new(),
        1 => " (1 warning)".into(),
        warnings => format!(" ({warnings} warnings)"),
    };
    if lacking.is_empty() {
        format!("This machine can run Antiphon{warnings}.")
    } else {
        format!("This machine cannot run Antiphon: it lacks {}{warnings}.", lacking.join(", "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use antiphon::device::cuda::Survey;

    fn diagnosis(broken: bool) -> Diagnosis {
        let tried = if broken { Err(std::io::Error::from_raw_os_error(38)) } else { Ok(()) };
        let checks = vec![
            Check {
                section: "System",
                ..Check::required("memfd_create", tried, "memory to share", "a remedy")
            },
            Check { section: "Memory", ..Check::warning("huge pages", "never", "Turn them on.") },
            Check { section: "Memory", ..Check::ok("RAM", "16 GiB", "for tensors") },
        ];
        Diagnosis { schema: 1, version: "0", healthy: !broken, checks, gpu: Survey::take() }
    }

    #[test]
    fn the_plain_table_is_aligned() {
        let expected = "\
System
  ok       memfd_create  works   memory to share

Memory
  warning  huge pages    never
                         Turn them on.
  ok       RAM           16 GiB  for tensors

This machine can run Antiphon (1 warning).
";
        assert_eq!(text(&diagnosis(false), false), expected);
    }

    #[test]
    fn the_verdict_names_what_is_lacking() {
        let shown = text(&diagnosis(true), false);
        assert!(
            shown.ends_with("This machine cannot run Antiphon: it lacks memfd_create (1 warning).\n"),
            "{shown}"
        );
        assert!(shown.contains("a remedy"));
    }

    #[test]
    fn colors_change_no_letter() {
        let plain = text(&diagnosis(true), false);
        let colored = text(&diagnosis(true), true);
        assert_ne!(plain, colored);
        assert_eq!(anstream::adapter::strip_str(&colored).to_string(), plain);
    }
}
