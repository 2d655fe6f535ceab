//! Rows as a table in the format of nccl-tests, for people and for scripts that read that format.

use std::io::{self, Write};

use super::{Machine, OnGpu, Row};

/// Writes each row as it arrives. Lines that start with `#` are for eyes.
#[derive(Debug)]
pub struct Table<W: Write> {
    writer: W,
    /// The collective and rank count that the last header was for.
    section: Option<(String, usize)>,
    summary: Summary,
}

/// The last lines of a table.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Summary {
    /// How many rows there were.
    pub rows: usize,
    /// How many elements were wrong, over all rows.
    pub errors: u64,
    /// The sum over rows of the bus bandwidth.
    busbw_sum: f64,
}

impl Summary {
    /// Whether every element was right.
    pub fn correct(&self) -> bool {
        self.errors == 0
    }

    /// The mean bus bandwidth over rows, in 10^9 bytes per second; 0 without rows.
    pub fn mean_busbw_gbs(&self) -> f64 {
        if self.rows == 0 { 0.0 } else { self.busbw_sum / self.rows as f64 }
    }
}

impl<W: Write> Table<W> {
    /// Writes where and when the rows are measured.
    pub fn new(mut writer: W, machine: &Machine) -> io::Result<Self> {
        let Machine { cpu, kernel, date, version, .. } = machine;
        writeln!(writer, "# antiphon {version}, {date}")?;
        writeln!(writer, "# {cpu}, {}, Linux {kernel}", machine.cores_in_words())?;
        if let Some(gpus) = &machine.gpus {
            writeln!(writer, "# {}", gpus.in_words())?;
        }
        writer.flush()?;
        Ok(Self { writer, section: None, summary: Summary::default() })
    }

    /// Writes one row, below a new header when it is of another collective or rank count than the last.
    pub fn row(&mut self, row: &Row) -> io::Result<()> {
        let section = (row.collective.clone(), row.ranks);
        if self.section.as_ref() != Some(&section) {
            self.header(&section.0, section.1, row.gpu.as_ref())?;
            self.section = Some(section);
        }
        let more = row.gpu.as_ref().map_or(Vec::new(), |gpu| gpu_cells(gpu, row.latency_us));
        let cells: [&str; 9] = [
            &row.bytes.to_string(),
            &row.count.to_string(),
            &row.dtype,
            row.op.as_deref().unwrap_or("none"),
            &row.algorithm,
            &four_digits(row.latency_us),
            &format!("{:.2}", row.algbw_gbs),
            &format!("{:.2}", row.busbw_gbs),
            &row.errors.to_string(),
        ];
        self.line(cells, &more)?;
        self.summary.rows += 1;
        self.summary.errors += row.errors;
        self.summary.busbw_sum += row.busbw_gbs;
        self.writer.flush() // a row takes seconds to measure: show it now
    }

    /// Writes whether all was right and the mean bus bandwidth.
    pub fn finish(mut self) -> io::Result<Summary> {
        let Summary { errors, .. } = self.summary;
        let verdict = if self.summary.correct() { "OK" } else { "FAILED" };
        writeln!(self.writer, "# Out of bounds values : {errors} {verdict}")?;
        writeln!(self.writer, "# Avg bus bandwidth    : {:.4}", self.summary.mean_busbw_gbs())?;
        self.writer.flush()?;
        Ok(self.summary)
    }

    fn header(&mut self, collective: &str, ranks: usize, gpu: Option<&OnGpu>) -> io::Result<()> {
        let plural = if ranks == 1 { "" } else { "s" };
        writeln!(self.writer, "#\n# {collective}, {ranks} rank{plural}")?;
        if let Some(gpu) = gpu {
            let launch = four_digits(gpu.launch_us);
            writeln!(
                self.writer,
                "# host: its time for one eager call; an empty kernel's launch takes {launch} us; free: without lining up the GPUs"
            )?;
        }
        let [names, units]: [&[&str]; 2] = match gpu {
            None => [&[], &[]],
            Some(OnGpu { nccl_us: None, .. }) => [&["host", "free"], &["(us)", "(us)"]],
            Some(_) => {
                [&["host", "free", "nccl", "nccl free", "ratio"], &["(us)", "(us)", "(us)", "(us)", ""]]
            }
        };
        let own = |cells: &[&str]| cells.iter().map(|&cell| cell.to_owned()).collect::<Vec<_>>();
        self.line(
            ["#  size", "count", "type", "redop", "algorithm", "time", "algbw", "busbw", "#wrong"],
            &own(names),
        )?;
        self.line(["#   (B)", "(elements)", "", "", "", "(us)", "(GB/s)", "(GB/s)", ""], &own(units))
    }

    fn line(&mut self, cells: [&str; 9], more: &[String]) -> io::Result<()> {
        let [bytes, count, dtype, op, algorithm, time, algbw, busbw, wrong] = cells;
        // The mark of a header stands in the first column, wherever the cell's text ends up.
        let (mark, bytes) = match bytes.strip_prefix('#') {
            Some(bytes) => ("#", bytes),
            None => (" ", bytes),
        };
        let mut line = format!(
            "{mark}{bytes:>11} {count:>12} {dtype:>9} {op:>6} {algorithm:>16} \
             {time:>9} {algbw:>8} {busbw:>8} {wrong:>7}"
        );
        more.iter().for_each(|cell| line += &format!(" {cell:>9}"));
        writeln!(self.writer, "{}", line.trim_end())
    }
}

/// The last columns of a row measured on GPUs: the host's time, the time without synchronised GPUs, both for NCCL, and the
/// ratio of ours to it.
fn gpu_cells(gpu: &OnGpu, latency_us: f64) -> Vec<String> {
    let host = gpu.host_us.map_or("-".into(), four_digits);
    let mut cells = vec![host, four_digits(gpu.free_us)];
    if let Some(nccl) = gpu.nccl_us {
        let free = gpu.nccl_free_us.map_or("-".into(), four_digits);
        cells.extend([four_digits(nccl), free, format!("{:.2}", latency_us / nccl)]);
    }
    cells
}

/// Four significant digits, and all digits before the point.
fn four_digits(number: f64) -> String {
    let digits = if number >= 1.0 { number.log10().floor() as usize + 1 } else { 1 };
    format!("{number:.decimals$}", decimals = 4usize.saturating_sub(digits).min(3))
}

#[cfg(test)]
mod tests {
    use super::super::tests::{machine, rows};
    use super::*;

    fn written(rows: &[Row]) -> (String, Summary) {
        let mut text = Vec::new();
        let mut table = Table::new(&mut text, &machine()).unwrap();
        rows.iter().for_each(|row| table.row(row).unwrap());
        let summary = table.finish().unwrap();
        (String::from_utf8(text).unwrap(), summary)
    }

    #[test]
    fn the_table_looks_like_that_of_nccl_tests() {
        let (text, summary) = written(&rows()[10..12]);
        let expected = "\
# antiphon 0.1.0, 2026-11-21T08:00:00Z
# Example <CPU> & Co, 8 cores, Linux 6.8.0
#
# all_reduce, 4 ranks
#       size        count      type  redop        algorithm      time    algbw    busbw  #wrong
#        (B)   (elements)                                        (us)   (GB/s)   (GB/s)
        4096         1024   float32    sum         one_shot     3.024     1.35     2.03       0
        4096         1024   float32    sum         two_shot     5.455     0.75     1.13       0
# Out of bounds values : 0 OK
# Avg bus bandwidth    : 1.5790
";
        assert_eq!(text, expected);
        assert!(summary.correct() && summary.rows == 2);
    }

    #[test]
    fn wrong_values_fail_the_table() {
        let mut rows = rows();
        rows[1].errors = 3;
        let (text, summary) = written(&rows);
        assert!(text.contains("# Out of bounds values : 3 FAILED\n"));
        assert_eq!(summary.errors, 3);
    }

    #[test]
    fn rows_of_gpus_show_nccl_beside_ours() {
        let gpu = OnGpu {
            calls: 100,
            host_us: Some(4.25),
            free_us: 3.5,
            launch_us: 1.9,
            nccl_us: None,
            nccl_free_us: None,
            nccl_host_us: None,
        };
        let mut rows = rows()[10..12].to_vec();
        rows[0].gpu = Some(OnGpu { nccl_us: Some(12.0), nccl_free_us: Some(12.5), ..gpu });
        rows[1].gpu = Some(OnGpu { nccl_us: Some(12.0), nccl_free_us: Some(12.5), host_us: None, ..gpu });
        let (text, _) = written(&rows);
        let expected = "\
# all_reduce, 4 ranks
# host: its time for one eager call; an empty kernel's launch takes 1.900 us; free: without lining up the GPUs
#       size        count      type  redop        algorithm      time    algbw    busbw  #wrong      host      free      nccl nccl free     ratio
#        (B)   (elements)                                        (us)   (GB/s)   (GB/s)              (us)      (us)      (us)      (us)
        4096         1024   float32    sum         one_shot     3.024     1.35     2.03       0     4.250     3.500     12.00     12.50      0.25
        4096         1024   float32    sum         two_shot     5.455     0.75     1.13       0         -     3.500     12.00     12.50      0.45
";
        assert!(text.contains(expected), "{text}");

        rows.iter_mut().for_each(|row| row.gpu = Some(gpu));
        let (text, _) = written(&rows);
        assert!(text.contains("#wrong      host      free\n"), "{text}");
        assert!(text.contains("  0     4.250     3.500\n"), "{text}");
    }

    #[test]
    fn a_new_collective_gets_a_header_and_no_rows_need_none() {
        let mut rows = rows();
        rows.truncate(2);
        (rows[1].collective, rows[1].op) = ("all_gather".into(), None);
        let (text, _) = written(&rows);
        assert_eq!(text.matches("#wrong").count(), 2);
        assert!(text.contains("# all_gather, 4 ranks") && text.contains("   none "));
        let (text, summary) = written(&[]);
        assert!(text.ends_with("# Avg bus bandwidth    : 0.0000\n"));
        assert_eq!(summary.mean_busbw_gbs(), 0.0);
    }

    #[test]
    fn rows_have_as_many_fields_as_the_header() {
        let (text, _) = written(&rows());
        let fields = |line: &str| line.trim_start_matches('#').split_whitespace().count();
        let header = text.lines().find(|line| line.contains("#wrong")).unwrap();
        assert!(
            text.lines().filter(|line| !line.starts_with('#')).all(|line| fields(line) == fields(header))
        );
    }

    #[test]
    fn times_show_four_digits() {
        let shown = [0.5, 1.0, 12.345, 999.96, 1234.5, 123456.7].map(four_digits);
        assert_eq!(shown, ["0.500", "1.000", "12.35", "1000.0", "1234", "123457"]);
        assert_eq!(four_digits(f64::NAN), "NaN");
    }
}
