//! The options of the operators, whose tables are those of `blockflash-foreign`.

use crate::foreign::{self, Foreign};
use blockflash_foreign::{Argument, Arguments, AttentionOptions, DecodeOptions, Value};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::PyTuple;
use pyo3::{Borrowed, IntoPyObjectExt};

/// The options of `attention` or `attention_decode` in their order: names, types as in torch's
/// schemas, and defaults.
#[pyfunction]
pub(crate) fn options(
    py: Python<'_>,
    operator: &str,
) -> PyResult<Vec<(&'static str, &'static str, Py<PyAny>)>> {
    let table = match operator {
        "attention" => AttentionOptions::TABLE,
        "attention_decode" => DecodeOptions::TABLE,
        _ => Err(PyTypeError::new_err(format!("there are no options of {operator:?}")))?,
    };
    let row = |argument: &Argument| {
        let default = match argument.default {
            Value::Missing => py.None(),
            Value::Int(number) => number.into_py_any(py)?,
            Value::Bool(truth) => truth.into_py_any(py)?,
            Value::Float(number) => number.into_py_any(py)?,
        };
        Ok((argument.name, argument.kind.in_torch(), default))
    };
    table.iter().map(row).collect()
}

/// The options of a call; those at the end may be left out.
pub(crate) struct Given<'a, 'py> {
    options: &'a Bound<'py, PyTuple>,
    at: usize,
}

impl<'a, 'py> Given<'a, 'py> {
    pub(crate) fn attention(
        options: &'a Bound<'py, PyTuple>,
    ) -> PyResult<AttentionOptions<Foreign<'a>>> {
        let mut given = Self { options, at: 0 };
        let read = AttentionOptions::read(&mut given)?;
        given.end().map(|()| read)
    }

    pub(crate) fn decode(options: &'a Bound<'py, PyTuple>) -> PyResult<DecodeOptions<Foreign<'a>>> {
        let mut given = Self { options, at: 0 };
        let read = DecodeOptions::read(&mut given)?;
        given.end().map(|()| read)
    }

    fn end(&self) -> PyResult<()> {
        let (given, known) = (self.options.len(), self.at);
        if given <= known {
            return Ok(());
        }
        Err(PyTypeError::new_err(format!("{given} options are given, but there are {known}")))
    }

    fn next(&mut self) -> PyResult<Option<Borrowed<'a, 'py, PyAny>>> {
        let at = self.at;
        self.at += 1;
        (at < self.options.len()).then(|| self.options.get_borrowed_item(at)).transpose()
    }

    fn value<T: for<'o> FromPyObject<'o, 'py, Error: Into<PyErr>>>(
        &mut self,
        name: &str,
    ) -> PyResult<Option<T>> {
        let Some(item) = self.next()? else { return Ok(None) };
        let wrong =
            |error: PyErr| PyTypeError::new_err(format!("{name}: {}", error.value(item.py())));
        item.extract()
            .map(Some)
            .map_err(|error: <T as FromPyObject<'_, 'py>>::Error| wrong(error.into()))
    }
}

impl<'a> Arguments for Given<'a, '_> {
    type Tensor = Foreign<'a>;
    type Error = PyErr;

    fn tensor(&mut self, name: &'static str) -> PyResult<Option<Foreign<'a>>> {
        match self.next()? {
            Some(item) if !item.is_none() => foreign::of(name, item).map(Some),
            _ => Ok(None),
        }
    }

    fn int(&mut self, name: &'static str) -> PyResult<Option<i64>> {
        self.value(name)
    }

    fn bool(&mut self, name: &'static str) -> PyResult<Option<bool>> {
        self.value(name)
    }

    fn float(&mut self, name: &'static str) -> PyResult<Option<f64>> {
        self.value(name)
    }

    fn optional_float(&mut self, name: &'static str) -> PyResult<Option<f64>> {
        self.value::<Option<f64>>(name).map(Option::flatten)
    }
}
