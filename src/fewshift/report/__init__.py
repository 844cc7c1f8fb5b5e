"""Results for people: sentences, figures, tables, pages."""
