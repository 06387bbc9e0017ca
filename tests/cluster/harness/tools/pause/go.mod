module mammoth.test/pause

go 1.26.0
