//! Rows as a JSON file.

use std::io::{Read, Write};

use serde::{Deserialize, Serialize};

use super::{Machine, Row};

/// The version of the layout that [`write_json`] writes. It grows when a reader of the last one would stumble.
pub const SCHEMA: u32 = 1;

#[derive(Serialize)]
struct Document<'a> {
    schema: u32,
    machine: &'a Machine,
    rows: &'a [Row],
}

/// The content of a file.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub struct Recorded {
    /// Where and when the rows were measured.
    pub machine: Machine,
    /// The rows, in the order of measurement.
    pub rows: Vec<Row>,
}

/// Why a file of results could not be written or read.
#[derive(Debug, thiserror::Error)]
pub enum JsonError {
    /// The text is not such a file, or it could not be written or read.
    #[error("results as JSON: {0}")]
    Json(#[from] serde_json::Error),
    /// The end of the file could not be written.
    #[error("results as JSON: {0}")]
    Io(#[from] std::io::Error),
    /// The file has another layout.
    #[error("results as JSON: the file has schema {found}, this version reads schema {SCHEMA}")]
    Schema {
        /// The file's version.
        found: u64,
    },
}

/// Writes rows for [`read_json`] and for other tools.
pub fn write_json(mut writer: impl Write, machine: &Machine, rows: &[Row]) -> Result<(), JsonError> {
    serde_json::to_writer_pretty(&mut writer, &Document { schema: SCHEMA, machine, rows })?;
    Ok(writer.write_all(b"\n").and_then(|()| writer.flush())?)
}

/// Reads what [`write_json`] wrote.
pub fn read_json(reader: impl Read) -> Result<Recorded, JsonError> {
    #[derive(Deserialize)]
    struct Version {
        schema: u64,
    }
    let value: serde_json::Value = serde_json::from_reader(reader)?;
    let Version { schema: found } = Version::deserialize(&value)?;
    if found != u64::from(SCHEMA) {
        return Err(JsonError::Schema { found });
    }
    Ok(Recorded::deserialize(value)?)
}

#[cfg(test)]
mod tests {
    use super::super::{
        OnGpu,
        tests::{gpus, machine, rows},
    };
    use super::*;

    fn written(rows: &[Row]) -> Vec<u8> {
        let mut text = Vec::new();
        write_json(&mut text, &machine(), rows).unwrap();
        text
    }

    #[test]
    fn what_is_written_is_read_back() {
        let text = written(&rows());
        assert!(text.starts_with(b"{\n  \"schema\": 1,\n") && text.ends_with(b"}\n"));
        assert_eq!(read_json(&text[..]).unwrap(), Recorded { machine: machine(), rows: rows() });
    }

    #[test]
    fn what_gpus_add_is_read_back_too() {
        let machine = Machine { gpus: Some(gpus()), ..machine() };
        let mut rows = rows();
        rows[0].gpu = Some(OnGpu {
            calls: 100,
            host_us: None,
            free_us: 3.5,
            launch_us: 1.9,
            nccl_us: Some(12.5),
            nccl_free_us: Some(13.5),
            nccl_host_us: None,
        });
        let mut text = Vec::new();
        write_json(&mut text, &machine, &rows).unwrap();
        assert_eq!(read_json(&text[..]).unwrap(), Recorded { machine, rows });
    }

    #[test]
    fn a_wrong_result_without_a_number_survives() {
        let mut rows = rows();
        (rows[0].errors, rows[0].max_error) = (1, f64::NAN);
        let read = read_json(&written(&rows)[..]).unwrap();
        assert!(read.rows[0].max_error.is_nan());
    }

    #[test]
    fn another_schema_is_refused_by_number() {
        let error = read_json(&br#"{"schema": 7, "machine": null}"#[..]).unwrap_err();
        assert!(error.to_string().contains("schema 7, this version reads schema 1"), "{error}");
        assert!(matches!(read_json(&b"[]"[..]), Err(JsonError::Json(_))));
    }
}
